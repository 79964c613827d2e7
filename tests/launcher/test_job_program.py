"""Which program the ranks run, and how it starts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.local_job import Start

pytestmark = pytest.mark.slow

LIBC_SIGNALS = 3 << 31  # 32 and 33, which the C library keeps to itself: whoever ignores them was started so


def test_a_script_that_is_missing_is_a_mistake(start_words: Start) -> None:
    job = start_words("trian.py")
    assert job.wait() == 2
    assert job.err == f"dslaunch: localhost: no script trian.py in {job.folder}\n"


def test_a_program_that_cannot_be_run(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "program").write_text("no")
    job = start_words("--no_python", "./program")
    assert job.wait() == 127
    assert "dslaunch: cannot run ./program: Permission denied" in job.err


def test_a_program_that_is_missing(start_words: Start) -> None:
    job = start_words("--no_python", "no-such-program")
    assert job.wait() == 127
    assert "dslaunch: cannot run no-such-program: No such file or directory" in job.err


def test_a_variable_that_the_kernel_does_not_take(start: Start, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text(f"LONG={'x' * 200_000}\n")
    job = start("")
    assert job.wait() == 127
    assert "Argument list too long" in job.err


def test_a_module_is_run(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys; print(__name__, __package__, sys.argv[1:])"
    )
    job = start_words("--module", "package", "-x", "y")
    assert job.wait() == 0
    assert job.out == "localhost:0 | __main__ package ['--local_rank=0', '-x', 'y']\n"


def test_a_program_is_run_as_it_is(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "run").write_text('#!/bin/sh\nprintf "%s|" "$@"; echo\n')
    (tmp_path / "run").chmod(0o755)
    job = start_words("--no_python", "--no_local_rank", "--", "./run", "a b", "", "*")
    assert job.wait() == 0
    assert job.out == "localhost:0 | a b||*|\n"


def test_a_program_is_found_in_the_path_of_the_workers(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").write_text("#!/bin/sh\necho found\n")
    (tmp_path / "bin" / "tool").chmod(0o755)
    (tmp_path / ".deepspeed_env").write_text(f"PATH={tmp_path}/bin:$PATH\n")
    job = start_words("--no_python", "tool")
    assert job.wait() == 0
    assert job.out == "localhost:0 | found\n"


def test_a_worker_starts_as_from_a_shell(start_words: Start) -> None:
    """No signal ignored or blocked, no open file but the three, a session of its own, an empty stdin."""
    script = "grep -E '^Sig(Ign|Blk)' /proc/self/status; ls /proc/self/fd; ps -o pid=,pgid=,sid= -p $$; echo $$; cat"
    job = start_words("--no_python", "--no_local_rank", "sh", "-c", script)
    assert job.wait() == 0
    blocked, ignored, *fds, ids, pid = job.lines(0)
    assert blocked == "SigBlk:\t0000000000000000"
    assert int(ignored.removeprefix("SigIgn:\t"), 16) & ~LIBC_SIGNALS == 0
    assert fds == ["0", "1", "2", "3"]  # 3 is that of ls
    assert ids.split() == [pid] * 3


def test_the_console_command_is_the_module(start_words: Start, tmp_path: Path) -> None:
    command = shutil.which("dslaunch", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("not installed as a command")
    made = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    module = subprocess.run(
        [sys.executable, "-m", "dslaunch", "--version"], capture_output=True, text=True, check=True
    )
    assert made.stdout == module.stdout

"""Which program the ranks run, and how it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.local_job import Start

pytestmark = pytest.mark.slow

# 32 and 33, which the C library keeps to itself: a process that ignores them was started so
LIBC_SIGNALS = 3 << 31


def test_a_script_that_is_missing_is_a_mistake(start_words: Start) -> None:
    job = start_words("trian.py")
    assert job.wait() == 2
    assert job.err == f"dslaunch: localhost: no script trian.py in {job.folder}\n"


def test_a_script_that_is_no_file_is_a_mistake(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    job = start_words("folder")
    assert job.wait() == 2
    assert job.err == (
        "dslaunch: localhost: folder is a folder without a __main__.py; give a script, or a package with "
        "--module\n"
    )
    job = start_words("-")
    assert job.wait() == 2
    assert job.err == (
        "dslaunch: the script - means standard input to Python, which the workers do not share; "
        "write the program into a file\n"
    )


def test_a_program_that_is_a_folder_is_told_so(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    job = start_words("--no_python", "./folder")
    assert job.wait() == 127
    assert "cannot run ./folder: Permission denied: it is a folder; give the program in it" in job.err


def test_a_program_that_cannot_be_run(start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "program").write_text("no")
    job = start_words("--no_python", "./program")
    assert job.wait() == 127
    assert (
        "dslaunch: cannot run ./program: Permission denied: it is not executable there; write chmod +x"
        in job.err
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "#!/bin/sh\r\necho here\r\n",
            "No such file or directory: the file is there, but not the interpreter",
        ),
        ("echo here\n", "Exec format error: it is no program, and its first line names no interpreter"),
    ],
)
def test_a_program_without_its_interpreter(text: str, why: str, start_words: Start, tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(text.encode())
    (tmp_path / "program").chmod(0o755)
    job = start_words("--no_python", "./program")
    assert job.wait() == 127
    assert f"dslaunch: cannot run ./program: {why}" in job.err


def test_a_program_that_is_missing(start_words: Start) -> None:
    job = start_words("--no_python", "no-such-program")
    assert job.wait() == 127
    assert (
        "dslaunch: cannot run no-such-program: No such file or directory: no folder of PATH there has it"
        in job.err
    )


def test_a_variable_that_the_kernel_does_not_take_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text(f"SMALL={'x' * 1000}\nHUGE={'y' * 140_000}\n")
    job = start("")
    assert job.wait() == 127, job.err
    assert (
        "Argument list too long: the variable HUGE has 140000 bytes, and the kernel takes 131072 for one"
        in job.err
    )

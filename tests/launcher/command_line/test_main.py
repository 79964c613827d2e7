"""The process of `dslaunch` before the command itself begins."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dslaunch
from tests.launcher.local_job import poll

WORDS = "dslaunch: interrupted: nothing was started\n"


@pytest.mark.slow
@pytest.mark.parametrize(("is_ignored", "code", "words"), [(False, 130, WORDS), (True, 7, "")])
def test_an_interrupt_while_the_first_modules_are_loaded_is_one_line(
    is_ignored: bool, code: int, words: str, tmp_path: Path
) -> None:
    """`contextlib` is the first module that takes time, and that Python itself has not loaded."""
    (tmp_path / "contextlib.py").write_text(
        "import os, sys, time\n"
        "open('loading', 'w').close()\n"
        "for _ in range(10_000):\n"
        "    if os.path.exists('go on'): os._exit(7)\n"
        "    time.sleep(0.01)\n"
    )
    folders = [str(tmp_path), str(Path(dslaunch.__file__).parents[1])]
    program = f"import sys; sys.path[:0] = {folders}; import dslaunch.launcher.command_line.main"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        started = subprocess.Popen(
            [sys.executable, "-S", "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    poll((tmp_path / "loading").exists, "the import")
    started.send_signal(signal.SIGINT)
    if is_ignored:
        (tmp_path / "go on").touch()
    assert started.communicate(timeout=60)[1] == words
    assert started.returncode == code


def test_on_another_system_one_line_says_what_it_runs_on() -> None:
    program = (
        "import sys; from dslaunch.launcher.command_line.main import run; sys.platform = 'darwin'; "
        "sys.argv[1:] = ['--num_gpus', '1', '-m', 'this']; run()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "dslaunch: it runs on Linux, and this is darwin; start jobs from a Linux machine\n"

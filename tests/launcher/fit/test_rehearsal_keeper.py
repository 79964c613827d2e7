"""The keeper of a rehearsal: it ends as the rehearsal does, and leaves no process of the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launcher.local_job import WORKER, poll

KEEPER = "dslaunch.launcher.fit.rehearsal_keeper"


def kept(program: str, *, folder: Path) -> subprocess.Popen[bytes]:
    """Start a program below a keeper; its processes are known by the folder, which is an argument."""
    command = (sys.executable, "-c", WORKER + program, str(folder))
    return subprocess.Popen([sys.executable, "-m", KEEPER, str(os.getpid()), *command])


def processes(folder: Path) -> list[psutil.Process]:
    found = []
    for one in psutil.process_iter(["cmdline", "status"]):
        if str(folder) in (one.info["cmdline"] or ()) and one.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(one)
    return found


@pytest.mark.parametrize(
    ("end", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("pass", 0)]
)
def test_its_end_is_that_of_the_rehearsal(end: str, code: int, tmp_path: Path) -> None:
    with kept(f"escape()\n{end}", folder=tmp_path) as keeper:
        assert keeper.wait(60) == code
    assert processes(tmp_path) == []


def test_the_launcher_ends_it_with_all_below(tmp_path: Path) -> None:
    with kept("escape()\nopen(sys.argv[1] + '/begun', 'w')\nwait()", folder=tmp_path) as keeper:
        poll((tmp_path / "begun").exists, "the program")
        keeper.terminate()
        assert keeper.wait(60) == 128 + signal.SIGTERM
    assert processes(tmp_path) == []

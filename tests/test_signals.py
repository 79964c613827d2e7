"""What the tests start gets every signal, however the tests themselves were started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_child_ignores_no_signal_that_ends_programs() -> None:
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    (ignored,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:"))
    for one in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        assert not ignored & 1 << one - 1, one.name


@pytest.mark.slow
def test_that_is_so_under_nohup_too() -> None:
    name = f"{__file__}::{test_a_child_ignores_no_signal_that_ends_programs.__name__}"
    done = subprocess.run(
        [
            "sh",
            "-c",
            'trap "" HUP INT QUIT TERM; exec "$@"',
            "sh",
            sys.executable,
            "-m",
            "pytest",
            "-q",
            name,
        ],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout

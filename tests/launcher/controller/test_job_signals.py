"""Signals, sent to processes of the tests."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import signal, sys
from dslaunch.launcher.controller.job_signals import ended_in_order

with ended_in_order():
    try:
        print("begun", flush=True)
        signal.pause()
    finally:
        print("cleaned up")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_finally_removes_is_removed_at_a_signal_too(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.stdout.read() == "cleaned up\n"
    assert process.returncode == 128 + number


def test_an_ignored_signal_stays_ignored() -> None:
    ignored = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{PROGRAM}"
    ignored = ignored.replace("signal.pause()", "signal.raise_signal(signal.SIGHUP); print('goes on')")
    done = subprocess.run([sys.executable, "-c", ignored], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["begun", "goes on", "cleaned up"]

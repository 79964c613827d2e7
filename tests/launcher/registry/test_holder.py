"""The process of a job is known beyond doubt: real processes, and numbers that mean another one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.launcher.registry.holder import FILE, Process, holder_of

HOLD = """
import os, signal, sys, time
from pathlib import Path
from dslaunch.launcher.registry.holder import hold
fd = hold(Path(sys.argv[1]))
signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
if "fork" in sys.argv and os.fork() == 0:
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)
else:
    os.write(1, b"held\\n")
    time.sleep(60)
"""


def start_holder(folder: Path, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_the_holder_is_the_process_that_holds_it_as_long_as_it_is_there(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None
    holder = start_holder(tmp_path)
    assert holder_of(tmp_path) == holder.pid
    holder.kill()
    holder.communicate()
    assert (tmp_path / FILE).exists()
    assert holder_of(tmp_path) is None


def test_a_signal_reaches_the_holder(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    with Process(tmp_path) as process:
        assert process.pid == holder.pid
        assert not process.has_ended()
        process.signal(signal.SIGUSR1)
        assert process.has_ended(timeout_s=10)
        process.signal(signal.SIGUSR1)  # nothing happens
    assert holder.wait() == 7
    holder.communicate()


def test_a_kernel_without_descriptors_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", absent)
    holder = start_holder(tmp_path)
    with Process(tmp_path) as process:
        assert not process.has_ended()
        process.signal(signal.SIGUSR1)
        assert process.has_ended(timeout_s=10)
        killed: list[int] = []
        monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
        process.signal(signal.SIGUSR1)  # its number may be another one's by now
        assert killed == []
    assert holder.wait() == 7
    holder.communicate()


def test_a_child_that_outlives_the_holder_is_not_taken_for_it(tmp_path: Path) -> None:
    holder = start_holder(tmp_path, "fork")
    assert holder.stdout is not None
    words = {holder.stdout.readline().strip()} - {"held", ""}
    holder.kill()
    holder.wait()
    assert holder_of(tmp_path) is None
    with pytest.raises(ProcessLookupError):
        Process(tmp_path)
    holder.stdout.close()
    for pid in words:
        os.kill(int(pid), signal.SIGKILL)


def test_a_process_that_has_the_number_of_an_ended_job_is_not_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends, and its number is given to another process, between the look and the descriptor."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    answers = iter([stranger.pid, None])
    monkeypatch.setattr("dslaunch.launcher.registry.holder.holder_of", lambda _: next(answers))
    with pytest.raises(ProcessLookupError):
        Process(tmp_path)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()

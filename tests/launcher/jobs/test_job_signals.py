"""Signals to the launcher: what becomes of the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dslaunch.launcher.controller import job_signals
from tests.lab import Lab
from tests.launcher.command import Command
from tests.launcher.local_job import WORKER, Job, poll

NOTING = """
def note(number, frame): say(rank, 'got', signal.Signals(number).name)
for number in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(number, note)
child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)  # SIGUSR1 would end it
say('ready')
while not os.path.exists('go'): time.sleep(0.005)
if child.poll() is not None: sys.exit(f'the child ended with {child.returncode}')
child.communicate(b'\\n')
"""


def test_watching_ends_as_it_began() -> None:
    numbers = (*job_signals.ENDING, *job_signals.PASSED_ON, job_signals.STOPPING)
    before = [signal.getsignal(number) for number in numbers]
    got: list[int] = []
    with job_signals.watch(got.append):
        for number in (signal.SIGUSR1, signal.SIGTSTP, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    assert got == [signal.SIGUSR1, signal.SIGTSTP, signal.SIGUSR1]
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_second_signal_may_come_when_all_is_over_and_the_third_still_ends_at_once() -> None:
    usr1 = signal.getsignal(signal.SIGUSR1)
    child = os.fork()
    if child == 0:
        got: list[int] = []
        with job_signals.watch(got.append):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        if got != [signal.SIGINT, signal.SIGTERM]:
            os._exit(1)
        if signal.getsignal(signal.SIGUSR1) != usr1:  # it ends no job
            os._exit(2)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    got: list[int] = []
    try:
        with job_signals.watch(got.append):
            os.kill(os.getpid(), signal.SIGUSR2)
        assert got == []
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


UNHEARD = {
    signal.SIGUSR1: "warning: SIGUSR1 (10): no worker runs that it could be passed on to",
    signal.SIGQUIT: "warning: SIGQUIT (3): no worker runs that could be asked what it does",
}


@pytest.mark.slow
def test_a_signal_before_the_workers_run_reaches_nobody_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "venv.sh").write_text("touch sourcing; while [ ! -e go ]; do sleep 0.01; done\n")
    (tmp_path / "train.py").write_text("")
    job = Job(tmp_path, ["--venv_script=venv.sh", "train.py"])
    try:
        poll((tmp_path / "sourcing").exists, "the venv script")
        for number, words in UNHEARD.items():
            job.signal(number)
            job.wait_for_err(words)
        (tmp_path / "go").touch()
        assert job.wait() == 0
    finally:
        job.end()


@pytest.mark.slow
def test_nor_does_one_while_hosts_are_looked_at_first(tmp_path: Path) -> None:
    """Such as the SIGUSR1 by which a batch system tells of the end of its time."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "torch.py").write_text(
        f"import time\nopen({str(tmp_path / 'asked')!r}, 'w').close()\ntime.sleep(60)\n"
    )
    (tmp_path / "train.py").write_text("")
    job = Job(tmp_path, ["--check", "train.py"], env={"PYTHONPATH": str(tmp_path / "slow")})
    try:
        poll((tmp_path / "asked").exists, "the look before the start")
        for number, words in UNHEARD.items():
            job.signal(number)
            job.wait_for_err(words)
        job.signal(signal.SIGTERM)
        assert job.wait() == 143
        assert job.err.endswith("dslaunch: SIGTERM (15): nothing was started\n")
    finally:
        job.end()


HEARTBEAT_S = 1.0


@pytest.mark.lab  # among those that have the machine to themselves: it counts heartbeats
@pytest.mark.slow
def test_ctrl_z_stops_the_launcher_and_the_workers_run_on(tmp_path: Path) -> None:
    """Longer than the heartbeat; in a group of its own, as a shell with job control starts it."""
    (tmp_path / "train.py").write_text(
        WORKER + "say('ready')\nwhile not os.path.exists('go'): time.sleep(0.005)"
    )
    (tmp_path / "home").mkdir()
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dslaunch", f"--heartbeat={HEARTBEAT_S:g}", "train.py"],
            cwd=tmp_path,
            env={**os.environ, "HOME": str(tmp_path / "home")},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=os.setpgrp,
        )
    try:
        launcher = psutil.Process(process.pid)
        poll(lambda: "ready" in (tmp_path / "out").read_text(), "the worker")
        workers = [one for one in launcher.children(recursive=True) if one.cmdline()[-2:-1] == ["train.py"]]
        assert len(workers) == 1
        os.killpg(process.pid, signal.SIGTSTP)
        poll(lambda: launcher.status() == psutil.STATUS_STOPPED, "the stop")
        until = time.monotonic() + 2.5 * HEARTBEAT_S
        poll(lambda: time.monotonic() > until or not workers[0].is_running(), "more than two heartbeats")
        assert workers[0].is_running()
        os.killpg(process.pid, signal.SIGCONT)
        until = time.monotonic() + 1.5 * HEARTBEAT_S  # no host is called lost for what it could not hear
        poll(lambda: time.monotonic() > until or process.poll() is not None, "more than a heartbeat")
        assert process.poll() is None, (tmp_path / "out").read_text()
        (tmp_path / "go").touch()
        assert process.wait(30) == 0
        assert (
            "dslaunch: stopping; the workers run on, for at most 60 minutes" in (tmp_path / "out").read_text()
        )
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_launcher_that_is_killed_while_stopped_leaves_nothing(lab: Lab) -> None:
    folder = lab.shared / "stopped"
    folder.mkdir()
    (folder / "train.py").write_text(WORKER + "say('ready'); wait()")
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    command = Command(lab.head, folder, "-H", "hosts", "--kill_grace=1", "train.py")
    command.wait_for("ready", times=2)
    command.process.send_signal(signal.SIGSTOP)
    command.process.kill()
    command.process.wait()
    assert lab.wait_until_clean(15.0) == []


@pytest.mark.slow
def test_signals_reach_workers_on_all_hosts(lab: Lab) -> None:
    folder = lab.shared / "signals"
    folder.mkdir()
    (folder / "train.py").write_text(WORKER + NOTING)
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=1\n")
    command = Command(lab.head, folder, "-H", "hosts", "train.py")
    command.wait_for("ready", times=3)
    for name in ("SIGUSR1", "SIGUSR2"):
        number = signal.Signals[name]
        command.process.send_signal(number)
        command.wait_for(f"got {name}", times=3)
        assert f"{name} ({number:d}): passed on to 3 workers" in command.err
    (folder / "go").touch()
    assert command.wait() == 0, command.err

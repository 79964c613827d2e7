"""A process that stood still knows it, and blames no host for that."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from dslaunch.launcher.controller import pulse
from dslaunch.launcher.controller.pulse import LATE_S, Pulse
from tests.lab import Lab
from tests.launcher.command import Command, poll


def test_a_gap_between_two_beats_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pulse, "awake_s", lambda: now)
    one = Pulse(5.0)
    now = 105.0 + LATE_S / 2  # a busy machine
    one.beat()
    assert one.take_gap_s() == 0.0
    now += 30.0  # seen by the thread that asks first
    assert one.take_gap_s() == 30.0
    one.beat()
    assert one.take_gap_s() == 0.0
    now += 40.0  # seen by the thread that beats first
    one.beat()
    assert one.take_gap_s() == 40.0
    assert one.take_gap_s() == 0.0


@pytest.fixture
def job(lab: Lab, request: pytest.FixtureRequest) -> Command:
    folder: Path = lab.shared / request.node.name
    folder.mkdir()
    (folder / "wait.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes[:2]))
    command = Command(lab.head, folder, "-H", "hosts", "--heartbeat=2", "--kill_grace=1", "wait.py")
    command.wait_for("up", times=2)
    return command


@pytest.mark.slow
def test_a_launcher_that_stood_still_blames_no_host(lab: Lab, job: Command) -> None:
    job.process.send_signal(signal.SIGSTOP)
    poll(lambda: not any("wait.py" in one.argv for _, one in lab.processes() if "dslaunch" not in one.argv),
         "the end of the workers, whose agents hear nothing", job)  # fmt: skip
    job.process.send_signal(signal.SIGCONT)
    assert job.wait() == 3
    assert "dslaunch: this machine stood still for " in job.err
    assert "no host is at fault: keep this machine awake" in job.err
    assert "dslaunch: node" not in job.err.replace("no GPU here", "").partition("this machine")[2]
    assert lab.wait_until_clean() == []


@pytest.mark.slow
def test_all_hosts_silent_at_once_are_the_launchers_own_network(lab: Lab, job: Command) -> None:
    lab.head.unplug()
    assert job.wait() == 3
    assert "dslaunch: nothing is heard of any host for 2 s: this machine has no network" in job.err
    assert "dslaunch: node" not in job.err.partition("nothing is heard")[2]
    assert lab.wait_until_clean(15) == []

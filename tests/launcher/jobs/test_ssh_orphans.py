"""Whatever is killed, stopped or cut: no process of that job is left on any host, and other jobs go on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import Host, Lab
from tests.launcher.command import BOTH_WAYS, Command, poll

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("way")]

CLEAN_WITHIN_S = 15.0
HEARTBEAT_S = 2
# Each worker has a grandchild, forked twice, in a session of its own, that ignores what it can.
WORK = """
import os, pathlib, signal, sys, time
child = "--plain" in sys.argv or os.fork()
if not child:
    os.setsid()
    if not os.fork():
        for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(one, signal.SIG_IGN)
        time.sleep(600)
    os._exit(0)
if "--plain" not in sys.argv:
    os.waitpid(child, 0)
print("up", os.getpid(), flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "work.py").write_text(WORK)
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=2\n")
    return folder


def launch(lab: Lab, folder: Path, *arguments: str, go: str = "go") -> Command:
    """A job of 3 workers that are all up and wait for a file."""
    options = ("-H", "hosts", "--kill_grace=1", f"--heartbeat={HEARTBEAT_S}", "--no_local_rank")
    command = Command(lab.head, folder, *options, "work.py", go, *arguments)
    command.wait_for("up ", times=3)
    return command


def assert_clean(lab: Lab) -> None:
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


def keeper_and_agent(host: Host) -> tuple[int, int]:
    """The two processes of ours above the workers of a host."""
    keeper, agent = sorted(one.pid for one in host.processes() if "exec(eval(" in one.argv)
    return keeper, agent


def workers(host: Host) -> list[int]:
    return [one.pid for one in host.processes() if "work.py" in one.argv]


@BOTH_WAYS
def test_the_launcher_killed_by_9_leaves_nothing(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder)
    command.process.kill()
    assert command.wait() == -signal.SIGKILL
    assert_clean(lab)


def test_an_agent_killed_by_9_is_a_lost_host(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder)
    _, agent = keeper_and_agent(lab.host("node2"))
    os.kill(agent, signal.SIGKILL)
    assert command.wait() == 3
    assert "dslaunch: node2: the agent ended: it was killed by SIGKILL" in command.err
    assert_clean(lab)


def test_a_keeper_killed_by_9_is_a_lost_host(lab: Lab, folder: Path) -> None:
    """Its agent is told so by a signal, ends the workers with their grace, and no rank is blamed."""
    command = launch(lab, folder)
    keeper, _ = keeper_and_agent(lab.host("node2"))
    os.kill(keeper, signal.SIGKILL)
    assert command.wait() == 3, command.err
    assert " on node2 (local rank " not in command.err
    assert "node2: the agent ended: it got SIGTERM, or the process above it was killed" in command.err
    assert_clean(lab)


def test_workers_end_though_both_processes_above_them_are_killed(lab: Lab, folder: Path) -> None:
    """Not so what escaped into a session of its own: then no process above it is ours any more."""
    command = launch(lab, folder, "--plain")
    for pid in keeper_and_agent(lab.host("node2")):
        with contextlib.suppress(ProcessLookupError):  # the agent has heard of its keeper's end already
            os.kill(pid, signal.SIGKILL)
    assert command.wait() == 3
    assert "dslaunch: node2: " in command.err
    assert_clean(lab)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1], ids=["keeper", "agent"])
def test_a_stopped_agent_leaves_nothing_when_its_launcher_is_killed(
    lab: Lab, folder: Path, victim: int
) -> None:
    command = launch(lab, folder)
    os.kill(keeper_and_agent(lab.host("node2"))[victim], signal.SIGSTOP)
    command.process.kill()
    command.wait()
    assert_clean(lab)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1], ids=["keeper", "agent"])
def test_a_stopped_agent_goes_on_and_so_does_the_job(lab: Lab, folder: Path, victim: int) -> None:
    command = launch(lab, folder)
    os.kill(keeper_and_agent(lab.host("node2"))[victim], signal.SIGSTOP)
    (folder / "go").touch()
    assert command.wait() == 0, command.err
    assert_clean(lab)


@pytest.mark.exhaustive
def test_stopped_workers_are_ended_with_the_others(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder)
    for pid in workers(lab.host("node2")):
        os.kill(pid, signal.SIGSTOP)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 143
    assert_clean(lab)


def test_a_frozen_host_is_lost_and_clean_once_it_is_thawed(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder)
    frozen = lab.host("node2")
    frozen.freeze()
    assert command.wait() == 3
    assert f"dslaunch: node2: nothing heard for {HEARTBEAT_S} s" in command.err
    others = [host for host in lab.hosts if host is not frozen]
    poll(lambda: not any(host.processes() for host in others), "the others clean", command, CLEAN_WITHIN_S)
    frozen.thaw()
    assert_clean(lab)


@pytest.mark.exhaustive
def test_a_login_that_is_killed_is_a_lost_host(lab: Lab, folder: Path) -> None:
    """The process of sshd on the host, which the agent's stream goes through."""
    command = launch(lab, folder)
    lab.host("node2").run(["pkill", "-9", "-f", "sshd: root@notty"], check=True)
    assert command.wait() == 3
    assert "dslaunch: node2: the connection ended before the job did" in command.err
    assert_clean(lab)


@pytest.mark.exhaustive
def test_an_ssh_that_is_killed_is_a_lost_host(lab: Lab, folder: Path) -> None:
    """A ProxyCommand is a child of ours on the launching machine, and the only way to that host."""
    target, jump = lab.host("node2"), lab.host("node1")
    (lab.head.home / ".ssh" / "config").write_text(
        f"Host node2\n  HostName {target.address}\n  ProxyCommand ssh -W %h:%p {jump.name}\n"
    )
    command = launch(lab, folder)
    (ssh,) = [one.pid for one in lab.head.processes() if one.argv.startswith("ssh -W")]
    os.kill(ssh, signal.SIGKILL)
    assert command.wait() == 3, command.err
    assert "dslaunch: node2: " in command.err
    assert_clean(lab)


def kill_launcher(lab: Lab, job: Command) -> None:
    job.process.kill()


def kill_a_worker(lab: Lab, job: Command) -> None:
    words = next(line for line in job.out.splitlines() if line.startswith("node2:")).split()
    lab.host("node2").run(["kill", "-9", words[-1]], check=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("end", [kill_launcher, kill_a_worker])
def test_two_jobs_on_the_same_hosts_do_not_touch_each_other(
    lab: Lab, folder: Path, end: Callable[[Lab, Command], None]
) -> None:
    first = launch(lab, folder, go="first")
    before = {pid for node in lab.nodes for pid in workers(node)}
    second = launch(lab, folder, go="second")
    end(lab, second)
    assert second.wait() != 0

    def left() -> set[int]:
        return {pid for node in lab.nodes for pid in workers(node)}

    poll(lambda: left() <= before, "the end of the second job", first, CLEAN_WITHIN_S)
    assert left() == before
    (folder / "first").touch()
    assert first.wait() == 0, first.err
    assert_clean(lab)

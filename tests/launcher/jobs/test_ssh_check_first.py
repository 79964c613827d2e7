"""Jobs with --check on real hosts: unfit hosts are named, and left out where the job may go on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.exhaustive import few
from tests.lab import Host, Lab
from tests.launcher.command import TIMEOUT_S, Command, poll

pytestmark = pytest.mark.slow

SLOW_MBIT, OTHER_MBIT = 20, 80
WHERE = "import os; print(os.environ['RANK'], os.uname().nodename)"


@pytest.fixture
def folder(lab: Lab, folder: Path, quick_python: str) -> Path:
    (folder / "where.py").write_text(WHERE)
    lines = [f"{node.name} slots=2 python={quick_python}\n" for node in lab.nodes]
    (folder / "hosts").write_text("".join(lines))
    return folder


def launch(lab: Lab, folder: Path, *words: str) -> Command:
    return Command(lab.head, folder, "-H", "hosts", "--num_gpus=1", *words, "where.py")


def places(command: Command) -> list[str]:
    return sorted(line.partition(" | ")[2] for line in command.out.splitlines())


def test_a_spare_takes_the_place_of_an_unfit_host(lab: Lab, folder: Path) -> None:
    (lab.host("node2").home / ".bashrc").write_text("echo no logins today >&2; exit 5\n")
    lab.host("node3").sshd_kill()
    command = launch(
        lab, folder, "--num_nodes=3", "--spares=1", "--min_nodes=2", "--connect_timeout=3", "--check"
    )
    assert command.wait() == 0, command.err
    assert places(command) == ["0 node1", "1 node4"]
    assert "2 of 4 hosts cannot be used\n    for the administrator: found by root on head" in command.err
    assert "see it with: ssh -v node3 true" in command.err
    assert "starting node4 instead of node2 (" in command.err
    assert "without node3 (node3 port 22 refused the connection)" in command.err
    assert lab.wait_until_clean() == []


@pytest.mark.exhaustive
def test_without_a_spare_nothing_starts(lab: Lab, folder: Path) -> None:
    lab.host("node3").sshd_kill()
    command = launch(lab, folder, "--num_nodes=3", "--check")
    assert command.wait() == 3
    assert places(command) == []
    assert "not started: 2 of 3 hosts can be used, and there is no spare" in command.err
    assert lab.wait_until_clean() == []


@pytest.mark.exhaustive
def test_good_hosts_are_one_line(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--check")
    assert command.wait() == 0, command.err
    assert places(command) == ["0 node1", "1 node2", "2 node3", "3 node4"]
    assert "all 4 hosts can be used (looked at in " in command.err
    assert "cannot" not in command.err


@pytest.mark.exhaustive
def test_a_host_with_a_slow_link_is_replaced(lab: Lab, folder: Path) -> None:
    for name in ("node1", "node3", "node4"):
        lab.host(name).slow_down(OTHER_MBIT)
    lab.host("node2").slow_down(SLOW_MBIT)
    lines = [f"{node.name} slots=2\n" for node in lab.nodes]  # whose Python has torch: it measures
    (folder / "hosts").write_text("".join(lines))
    command = launch(lab, folder, "--num_nodes=3", "--spares=1", "--check_bandwidth")
    assert command.wait(3 * TIMEOUT_S) == 0, command.err
    assert places(command) == ["0 node1", "1 node4", "2 node3"]
    assert "node2: even its fastest link carries 2." in command.err
    assert "starting node4 instead of node2 (even its fastest link carries" in command.err
    assert lab.wait_until_clean() == []


@pytest.mark.parametrize(
    ("fault", "said"),
    few(
        [
            ("die", "node2: the connection ended before the job did"),
            ("kill_rank", "node2: what measures was killed by SIGKILL (9) there"),
        ],
        lambda fault, said: fault == "die",
    ),
)
def test_a_host_that_is_lost_while_the_network_is_measured_is_replaced(
    lab: Lab, folder: Path, fault: str, said: str
) -> None:
    for node in lab.nodes:
        node.slow_down(SLOW_MBIT)  # so that there is time
    words = ("--num_nodes=2", "--spares=1", "--heartbeat=4", "--check_bandwidth")
    command = launch(lab, folder, *words)
    lost = lab.host("node2")
    poll(lambda: len(measuring(lost)) == 1 and len(measuring(lab.host("node1"))) == 1, "measuring", command)
    if fault == "kill_rank":
        os.kill(measuring(lost)[0], signal.SIGKILL)
    else:
        getattr(lost, fault)()
    for node in lab.nodes:
        if node is not lost or fault == "kill_rank":
            node.end_slowness()
    assert command.wait(3 * TIMEOUT_S) == 0, command.err
    assert places(command) == ["0 node1", "1 node3"]
    assert f"dslaunch: warning: {said}" in command.err
    assert "starting node3 instead of node2 (" in command.err
    lost.thaw()
    assert lab.wait_until_clean() == []


def measuring(host: Host) -> list[int]:
    return [one.pid for one in host.processes() if "network_check" in one.argv]

"""Jobs whose hosts are reached through gateways: the way, what is said when it fails,
and that nothing stays behind.

Six nodes in groups of three: node1 and node4 are gateways. All hosts of the lab hold one key that
opens all of them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LAB_NAME, LAB_WAIT_S
from tests.lab import Host, Lab
from tests.launcher.command import AT_ONCE_S, BUSY_S, Command, poll

pytestmark = pytest.mark.slow

NUM_NODES = 6
TREE = ("-H", "hosts", "--tree_above=2", "--tree_radix=2")
CLEAN_WITHIN_S = 15.0
WORK = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
print("up", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
if f"--exit={rank}" in sys.argv:
    print("about to fail", file=sys.stderr, flush=True)
    sys.exit(5)
time.sleep(0 if "--end" in sys.argv else 600)
"""
SHOW = """
import json, os, sys
origin = os.environ["SSH_CONNECTION"].split()[0]
print(json.dumps([os.uname().nodename, os.environ["RANK"], os.environ["MASTER_ADDR"], origin]))
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Instead of the lab with 4 nodes."""
    reason = Lab.can_be_made()
    if reason is not None:
        if os.environ.get("DSLAUNCH_LAB") == "required":
            pytest.fail(f"DSLAUNCH_LAB=required, but no lab can be made: {reason}", pytrace=False)
        pytest.skip(f"no lab: {reason}")
    with Lab.up(NUM_NODES, name=f"{LAB_NAME}-tree", wait_s=LAB_WAIT_S) as made:
        yield made


@pytest.fixture
def folder(folder: Path, lab: Lab) -> Path:
    (folder / "work.py").write_text(WORK)
    (folder / "show.py").write_text(SHOW)
    (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes))
    return folder


def launch(lab: Lab, folder: Path, *words: str) -> Command:
    """A job of 6 workers that are all up and wait for the file `go`."""
    command = Command(lab.head, folder, *TREE, "--kill_grace=2", *words)
    command.wait_for("up", times=NUM_NODES)
    return command


def ways(lab: Lab, command: Command) -> dict[str, str]:
    """Of a show.py job that ended well: from where each host was reached."""
    assert command.wait() == 0, command.err
    names = {host.address: host.name for host in lab.hosts}
    shown = [json.loads(line.partition(" | ")[2]) for line in command.out.splitlines()]
    assert sorted((int(rank), host) for host, rank, _, _ in shown) == [
        (rank, node.name) for rank, node in enumerate(lab.nodes)
    ]
    assert {address for _, _, address, _ in shown} == {lab.host("node1").address}
    return {host: names[source] for host, _, _, source in shown}


def through_gateways(lab: Lab, **others: str) -> dict[str, str]:
    """The planned ways, but for `others`."""
    planned = {
        node.name: "head" if place % 3 == 0 else f"node{1 + place // 3 * 3}"
        for place, node in enumerate(lab.nodes)
    }
    return {**planned, **others}


def said(command: Command) -> list[str]:
    """What dslaunch said of the tree."""
    return [line for line in command.err.splitlines() if "directly" in line]


def assert_clean(lab: Lab) -> None:
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


@pytest.mark.usefixtures("way")
def test_hosts_are_reached_through_gateways_and_the_job_is_the_same(lab: Lab, folder: Path) -> None:
    command = Command(lab.head, folder, *TREE, "--timings", "show.py")
    assert ways(lab, command) == through_gateways(lab)
    assert said(command) == []
    assert "; 4 hosts reached through 2 gateways\n" in command.err
    left = [process.argv for _, process in lab.processes()]
    assert not [argv for argv in left if "show.py" in argv], "already when the command returns"
    assert_clean(lab)  # the agents, which were the last to speak, a moment later


@pytest.mark.exhaustive
def test_as_few_hosts_as_said_are_reached_directly(lab: Lab, folder: Path) -> None:
    command = Command(lab.head, folder, "-H", "hosts", "--tree_above=6", "--tree_radix=2", "show.py")
    assert set(ways(lab, command).values()) == {"head"}


@pytest.mark.exhaustive
def test_a_window_of_one_is_enough(lab: Lab, folder: Path) -> None:
    """A host that waits for its gateway does not keep the gateway from being connected."""
    assert ways(lab, Command(lab.head, folder, *TREE, "--connect_window=1", "show.py")) == through_gateways(
        lab
    )


@pytest.mark.exhaustive
def test_a_user_of_the_hostfile_is_the_one_that_a_gateway_logs_in_as(lab: Lab, folder: Path) -> None:
    (folder / "hosts").write_text("".join(f"root@{node.name} slots=1 port=22\n" for node in lab.nodes))
    for gateway in ("node1", "node4"):
        (lab.host(gateway).home / ".ssh" / "config").write_text("Host *\n  User nobody\n  Port 1\n")
    assert ways(lab, Command(lab.head, folder, *TREE, "show.py")) == through_gateways(lab)


@pytest.mark.exhaustive
def test_ctrl_c_while_hosts_are_being_connected_ends_at_once(lab: Lab, folder: Path) -> None:
    lab.host("node5").sshd_stop()
    command = Command(lab.head, folder, *TREE, "--connect_timeout=60", "work.py")
    poll(lambda: "5 of 6 hosts connected, waiting for node5" in command.err, "progress", command)
    command.process.send_signal(signal.SIGINT)
    assert command.wait(AT_ONCE_S) == 130
    assert_clean(lab)


@pytest.mark.usefixtures("way")
def test_the_launcher_killed_by_9_leaves_nothing(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "work.py")
    relays = [one for _, one in lab.processes() if one.argv.startswith("ssh -T ")]
    assert len(relays) == 4, "the ssh of the gateways, else this test looks in the wrong place"
    command.process.kill()
    assert command.wait() == -signal.SIGKILL
    assert_clean(lab)


@pytest.mark.exhaustive
def test_a_gateway_without_trust_in_one_host_leaves_that_to_the_launcher(lab: Lab, folder: Path) -> None:
    known = lab.host("node4").home / ".ssh" / "known_hosts"
    lines = known.read_text().splitlines(keepends=True)
    known.write_text("".join(line for line in lines if not line.startswith("node6,")))
    command = Command(lab.head, folder, *TREE, "show.py")
    assert ways(lab, command) == through_gateways(lab, node6="head")
    assert said(command) == [
        "dslaunch: node4: cannot reach node6 (Host key verification failed); 1 host is connected directly"
    ]
    assert_clean(lab)


@pytest.mark.exhaustive
def test_a_gateway_without_a_key_is_said_once(lab: Lab, folder: Path) -> None:
    (lab.host("node4").home / ".ssh" / "id_ed25519").unlink()
    command = Command(lab.head, folder, *TREE, "show.py")
    assert ways(lab, command) == through_gateways(lab, node5="head", node6="head")
    (line,) = said(command)
    assert line.startswith("dslaunch: node4: cannot reach node")
    assert " and 1 more (root@node" in line
    assert "Permission denied (publickey)" in line
    assert line.endswith("); 2 hosts are connected directly")
    assert_clean(lab)


@pytest.mark.exhaustive
def test_a_gateway_without_ssh_leaves_all_to_the_launcher(lab: Lab, folder: Path) -> None:
    hide_ssh(lab.host("node4"))
    command = Command(lab.head, folder, *TREE, "show.py")
    assert ways(lab, command) == through_gateways(lab, node5="head", node6="head")
    (line,) = said(command)
    assert line.endswith(" and 1 more (no ssh there); 2 hosts are connected directly")


def hide_ssh(host: Host) -> None:
    """Programs for a login there, all but ssh."""
    words = (
        "mkdir /root/bin && ln -s /bin/* /root/bin && rm /root/bin/ssh && echo PATH=/root/bin > /root/.bashrc"
    )
    host.run(["sh", "-c", words], check=True)


@pytest.mark.exhaustive
def test_a_gateway_that_allows_one_session_leaves_all_to_the_launcher(
    lab: Lab, folder: Path, way: str
) -> None:
    """With an ssh for each session there is one in each connection."""
    node = lab.host("node1")
    node.sshd_kill()
    node.run(["/usr/sbin/sshd", "-o", "MaxSessions=1"], check=True)
    node.wait_for_sshd()
    command = Command(lab.head, folder, *TREE, "show.py")
    try:
        others = {"node2": "head", "node3": "head"} if way == "ssh" else {}
        assert ways(lab, command) == through_gateways(lab, **others)
    finally:
        node.sshd_kill()  # `restore` starts it as it was
    if way == "openssh":
        assert said(command) == []
        return
    (line,) = said(command)
    assert line.startswith("dslaunch: node1: cannot be a gateway (SSH refused to run a command: ")


@pytest.mark.exhaustive
def test_a_gateway_that_cannot_be_reached_is_the_only_error(lab: Lab, folder: Path) -> None:
    lab.host("node4").sshd_kill()
    command = Command(lab.head, folder, *TREE, "show.py")
    assert command.wait() == 3
    errors = [
        line for line in command.err.splitlines() if "no GPU" not in line and " hosts connected, " not in line
    ]
    assert len(errors) == 2, command.err
    assert errors[0].startswith("dslaunch: node4: cannot be a gateway (node4 port 22 refused the connection")
    assert errors[0].endswith("; 2 hosts are connected directly")
    assert errors[1].startswith(
        "dslaunch: node4: node4 port 22 refused the connection; is sshd running there"
    )
    assert command.out == ""
    assert_clean(lab)


@pytest.mark.exhaustive
def test_a_gateway_that_dies_during_the_start_is_the_host_that_failed(lab: Lab, folder: Path) -> None:
    lab.host("node5").sshd_stop()  # so that the start does not get further than this
    command = Command(lab.head, folder, *TREE, "--kill_grace=2", "--connect_timeout=5", "work.py")
    gateway = lab.host("node4")
    poll(lambda: any(one.argv.startswith("ssh -T ") for one in gateway.processes()), "its ssh", command)
    gateway.die()
    lab.host("node5").sshd_continue()
    assert command.wait() == 3
    errors = [line for line in command.err.splitlines() if line.startswith("dslaunch: node4: ")]
    assert errors, command.err
    assert "dslaunch: node5: " not in command.err
    assert "dslaunch: node6: " not in command.err
    assert command.out == ""
    assert_clean(lab)


def test_a_gateway_that_dies_during_the_run_is_the_culprit(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--report=report.json", "work.py")
    lab.host("node4").die()
    assert command.wait() == 3
    report = json.loads((folder / "report.json").read_text())
    assert report["culprit"]["host"] == "node4"
    assert report["culprit"]["message"] == "the connection ended before the job did"
    assert {one["host"] for one in report["others"]} == {"node5", "node6"}
    assert all(one["is_way_lost"] for one in report["others"])
    assert "dslaunch: node[5-6]: lost together with node4, through which it was reached" in " ".join(
        command.err.split()
    )
    assert_clean(lab)


@pytest.mark.exhaustive
def test_a_gateway_that_falls_silent_is_the_culprit(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--heartbeat=3", "--report=report.json", "work.py")
    lab.host("node4").unplug()
    began = time.monotonic()
    assert command.wait() == 3
    assert time.monotonic() - began < 3 + 2 + BUSY_S
    report = json.loads((folder / "report.json").read_text())
    assert report["culprit"]["host"] == "node4"
    assert "dslaunch: node4: nothing heard for 3 s" in command.err
    assert lab.wait_until_clean(3 + 10 + CLEAN_WITHIN_S) == []


@pytest.mark.exhaustive
def test_a_launcher_that_falls_silent_leaves_nothing(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--heartbeat=3", "work.py")
    lab.head.unplug()
    assert command.wait() == 3
    assert lab.wait_until_clean(3 + 2 + 10 + CLEAN_WITHIN_S) == []


@pytest.mark.exhaustive
def test_a_host_behind_a_gateway_that_falls_silent_is_the_culprit(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--heartbeat=3", "work.py")
    lab.host("node5").unplug()
    assert command.wait() == 3
    assert "dslaunch: node5: nothing heard for" in command.err
    assert "node4" not in command.err.replace("no GPU here", "").partition("stopping")[2]
    assert_clean(lab)


@pytest.mark.usefixtures("way")
@pytest.mark.exhaustive
def test_a_relay_that_is_killed_is_a_failure_of_its_gateway(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--report=report.json", "work.py")
    gateway = lab.host("node4")
    relay = next(one for one in gateway.processes() if one.argv.startswith("ssh -T "))
    os.kill(parent_of(relay.pid), signal.SIGKILL)
    assert command.wait() == 3
    culprit = json.loads((folder / "report.json").read_text())["culprit"]
    assert culprit["host"] == "node4"
    assert culprit["message"].startswith("the relay to the hosts behind it ended")
    assert_clean(lab)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.exhaustive
def test_a_lost_gateway_is_replaced_and_the_hosts_behind_it_stay(lab: Lab, folder: Path) -> None:
    words = ("--tree_above=2", "--tree_radix=2", "--spares=1", "--max_restarts=1", "--min_uptime=0")
    command = Command(lab.head, folder, "-H", "hosts", *words, "--kill_grace=2", "work.py", "--end")
    command.wait_for("up", times=NUM_NODES - 1)
    lab.host("node4").die()
    command.wait_for("up", times=2 * (NUM_NODES - 1))
    (folder / "go").touch()
    assert command.wait() == 0, command.err
    (line,) = [one for one in command.err.splitlines() if "starting again" in one]
    assert line.endswith("; node6 instead of node4 (the connection ended before the job did)")
    assert_clean(lab)


@pytest.mark.exhaustive
def test_what_a_gateway_shows_in_ps_is_the_login_and_nothing_of_the_job(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "work.py", "--end")
    shown = [one.argv for one in lab.host("node1").processes() if one.argv.startswith("ssh -T ")]
    (folder / "go").touch()
    assert command.wait() == 0, command.err
    assert len(shown) == 2
    for argv in shown:
        assert "-o BatchMode=yes" in argv
        assert "-o StrictHostKeyChecking=yes" in argv  # whatever the gateway's own configuration says
        assert "work.py" not in argv
        assert str(folder) not in argv

"""What a host of the lab is like, and how commands run on it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.lab.lab import CHECKOUT
from tests.lab.observe import SOON_S, banner, eventually, next_line, running, ssh

# 32 and 33, which the C library keeps to itself: a process that ignores them was started so
LIBC_SIGNALS = 3 << 31


def test_hosts_reach_each_other_by_name_and_by_address(lab: Lab) -> None:
    assert [host.name for host in lab.hosts] == ["head", "node1", "node2", "node3", "node4"]
    for target in lab.nodes[:2]:
        assert banner(lab.head, target.name).startswith("SSH-2.0-")
        assert banner(lab.nodes[0], target.address).startswith("SSH-2.0-")


def test_a_host_has_a_hostname_and_folders_of_its_own(lab: Lab) -> None:
    node1, node2 = lab.nodes[:2]
    for folder in ("/root", "/tmp", "/var/tmp", "/run", "/dev/shm", "/var/log"):
        node1.run(["touch", f"{folder}/mine"], check=True)
        assert node1.run(["ls", f"{folder}/mine"]).returncode == 0
        assert node2.run(["ls", f"{folder}/mine"]).returncode != 0
        assert not Path(folder, "mine").exists()
    assert (node1.home / "mine").exists()
    assert node1.run(["hostname"]).stdout == "node1\n"
    assert f"{lab.nodes[-1].address} node4" in node1.run(["cat", "/etc/hosts"]).stdout.splitlines()


def test_a_host_sees_its_own_processes_only(lab: Lab) -> None:
    with running(lab.head, "sleep", "1234"):
        listed = lab.nodes[0].run(["ps", "-e", "-o", "args="]).stdout
    assert "sleep 1234" not in listed
    assert "tests/lab/init.sh node1" in listed


def test_nothing_but_the_lab_can_be_reached(lab: Lab) -> None:
    assert (
        lab.head.run(["ip", "route"]).stdout
        == "10.77.0.0/16 dev eth0 proto kernel scope link src 10.77.0.1 \n"
    )


def test_a_command_has_the_environment_of_a_login(lab: Lab) -> None:
    assert sorted(lab.head.run(["env"], env={"COLOUR": "blue"}).stdout.splitlines()) == [
        "COLOUR=blue",
        "HOME=/root",
        "LANG=C.UTF-8",
        "LOGNAME=root",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PWD=/root",
        "SHELL=/bin/bash",
        "USER=root",
    ]
    assert lab.head.run(["pwd"]).stdout == "/root\n"
    assert lab.head.run(["pwd"], cwd="/usr").stdout == "/usr\n"


@pytest.mark.slow
def test_ssh_opens_every_node_from_the_head_and_from_other_nodes(lab: Lab) -> None:
    for host, target in ((lab.head, lab.nodes[3].address), (lab.nodes[1], "node4")):
        done = ssh(host, target, "hostname; exit 7")
        assert (done.returncode, done.stdout, done.stderr) == (7, "node4\n", "")


def test_checkout_and_python_are_visible_at_their_own_paths_and_read_only(lab: Lab) -> None:
    code = "import sys, pytest, tests.lab; print(sys.prefix, sys.base_prefix, tests.lab.__file__)"
    done = lab.nodes[0].run([sys.executable, "-c", code], cwd=CHECKOUT, check=True)
    assert done.stdout.split() == [sys.prefix, sys.base_prefix, f"{CHECKOUT}/tests/lab/__init__.py"]
    for folder in (CHECKOUT, sys.prefix, sys.base_prefix, "/usr", "/etc"):
        assert "Read-only file system" in lab.nodes[0].run(["touch", f"{folder}/written"]).stderr


def test_the_shared_folder_is_the_same_on_all_hosts(lab: Lab) -> None:
    lab.nodes[0].run(["sh", "-c", f"echo from node1 > {lab.shared}/note"], check=True)
    assert lab.nodes[1].run(["cat", lab.shared / "note"]).stdout == "from node1\n"
    (lab.shared / "note").unlink()
    assert lab.hostfile == lab.shared / "hostfile"
    assert lab.hostfile.read_text() == "node1 slots=2\nnode2 slots=2\nnode3 slots=2\nnode4 slots=2\n"


@pytest.mark.slow
def test_the_interface_counts_bytes(lab: Lab) -> None:
    node1, node2 = lab.nodes[:2]
    sent, received = node1.tx_bytes(), node2.rx_bytes()
    node1.run(["sh", "-c", "head -c 100000 /dev/zero | ssh node2 'cat >/dev/null'"], check=True)
    assert node1.tx_bytes() - sent > 100_000
    assert eventually(lambda: node2.rx_bytes() - received > 100_000)


# ---- commands on a host ----------------------------------------------------------------------------------


def test_a_signal_reaches_the_command_and_its_death_is_seen(lab: Lab) -> None:
    with running(lab.head, "sleep", "1000") as process:
        process.terminate()
        assert process.wait(SOON_S) == -signal.SIGTERM
    script = "trap 'echo caught; exit 3' INT; echo ready; while :; do read -r -t 0.01 || :; done"
    with running(lab.head, "bash", "-c", script) as process:
        assert next_line(process) == "ready"
        process.send_signal(signal.SIGINT)
        assert next_line(process) == "caught"
        assert process.wait(SOON_S) == 3


def test_a_command_ignores_no_signal_even_if_the_test_run_does(lab: Lab) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup or in the background of a script
    try:
        status = lab.head.run(["cat", "/proc/self/status"]).stdout
    finally:
        signal.signal(signal.SIGINT, before)
    (ignored,) = re.findall(r"SigIgn:\t([0-9a-f]+)\n", status)
    assert int(ignored, 16) & ~LIBC_SIGNALS == 0


def test_a_value_of_the_environment_never_shows_in_a_command_line(lab: Lab) -> None:
    shown: list[str] = []
    for _ in range(10):
        with running(lab.head, "sleep", "1000", env={"TOKEN": "canary"}) as process:
            while "sleep 1000" not in shown[-1:]:
                shown += sorted(lab.head.commands(), key=lambda argv: argv == "sleep 1000")
            process.kill()
        shown.append("next round")
    assert not [argv for argv in shown if "canary" in argv]


def test_run_kills_the_command_at_its_time_limit(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lab.head.run(["sleep", "1000"], timeout=0.05)
    assert lab.wait_until_clean() == []


def test_run_keeps_bytes_that_are_not_text(lab: Lab) -> None:
    done = lab.head.run(["printf", r"\377 ok"])
    assert os.fsencode(done.stdout) == b"\xff ok"
    assert lab.head.run(["no-such-program"]).returncode == 127
    with pytest.raises(subprocess.CalledProcessError):
        lab.head.run(["false"], check=True)


def test_a_daemonised_grandchild_is_listed_until_it_is_gone(lab: Lab) -> None:
    lab.nodes[2].run(["sh", "-c", "(setsid sleep 1000 </dev/null >/dev/null 2>&1 &)"], check=True)
    assert eventually(lambda: [process.argv for process in lab.nodes[2].processes()] == ["sleep 1000"])
    ((host, process),) = lab.wait_until_clean(timeout_s=0)
    assert (host, process.argv) == ("node3", "sleep 1000")
    os.kill(process.pid, signal.SIGKILL)
    assert lab.wait_until_clean() == []


@pytest.mark.slow
def test_an_ssh_session_is_seen_by_its_command_and_by_ps(lab: Lab) -> None:
    with running(lab.head, "ssh", "node1", "echo started; exec sleep 1000") as process:
        assert next_line(process) == "started"
        assert eventually(lambda: [each.argv for each in lab.nodes[0].processes()] == ["sleep 1000"])
        assert sorted(argv.split()[:2] for argv in lab.nodes[0].commands()[1:]) == [
            ["sleep", "1000"],
            ["sshd:", "/usr/sbin/sshd"],
            ["sshd:", "root@notty"],
        ]

"""What can go wrong with a host, as the other hosts see it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.lab import Lab, LabError
from tests.lab.observe import (
    BANNER,
    QUIET_S,
    SOON_S,
    banner,
    connected,
    eventually,
    is_readable,
    next_line,
    running,
    ssh,
)


@pytest.mark.slow
def test_link_down_loses_carrier_and_link_up_brings_it_back(lab: Lab) -> None:
    node = lab.nodes[0]
    node.link_down()
    assert node.run(["cat", "/sys/class/net/eth0/carrier"]).stdout == "0\n"
    assert node.condition() == "link down"
    with pytest.raises(subprocess.TimeoutExpired):
        lab.head.run(["bash", "-c", BANNER, "node1", "0.3"], timeout=QUIET_S)
    node.link_up()
    assert eventually(lambda: banner(lab.head, "node1") != "")
    assert node.condition() == "up"


@pytest.mark.slow
def test_a_silent_cut_is_silent(lab: Lab) -> None:
    node = lab.nodes[0]
    with connected(lab.head, node) as client:
        node.unplug()
        node.kill_processes()  # the kernel of node1 tells the other side, but the frame does not arrive
        assert not is_readable(client, QUIET_S)
        assert node.run(["cat", "/sys/class/net/eth0/carrier"]).stdout == "1\n"
        assert node.condition() == "unplugged"
        node.plug()
        assert next_line(client) == "closed"


@pytest.mark.slow
def test_die_is_heard_and_poweroff_is_not(lab: Lab) -> None:
    node = lab.nodes[0]
    with connected(lab.head, node) as client:
        node.die()
        assert next_line(client) == "closed"
    assert node.condition() == "down"
    assert "Connection refused" in ssh(lab.head, "node1", "true").stderr
    assert node.processes() == []
    with pytest.raises(LabError, match="node1: is down"):
        node.run(["true"])

    node.boot()
    assert ssh(lab.head, "node1", "hostname").stdout == "node1\n"
    with connected(lab.head, node) as client:
        node.poweroff()
        assert not is_readable(client, QUIET_S)
    node.boot()
    assert eventually(lambda: ssh(lab.head, "node1", "hostname").stdout == "node1\n")


@pytest.mark.slow
def test_a_frozen_host_stands_still_until_it_is_thawed(lab: Lab) -> None:
    node = lab.nodes[0]
    with running(node, "sh", "-c", "while echo tick; do sleep 0.01; done") as process:
        assert next_line(process) == "tick"
        node.freeze()
        assert process.stdout is not None
        while is_readable(process, 0):
            os.read(process.stdout.fileno(), 1 << 16)  # what it wrote before
        assert not is_readable(process, QUIET_S)
        assert (node.condition(), banner(lab.head, "node1", within_s=0.3)) == ("frozen", "")
        node.thaw()
        assert is_readable(process, SOON_S)


def test_a_frozen_host_can_die(lab: Lab) -> None:
    with running(lab.nodes[0], "sleep", "1000") as process:
        lab.nodes[0].freeze()
        lab.nodes[0].die()  # would hang if a frozen process could not be killed
        assert process.returncode == -signal.SIGKILL
    assert lab.nodes[0].condition() == "down"


@pytest.mark.slow
def test_sshd_stops_continues_dies_and_starts(lab: Lab) -> None:
    node = lab.nodes[0]
    node.sshd_stop()
    silent = lab.head.run(["bash", "-c", BANNER, "node1", "0.3"])
    assert (silent.returncode > 128, silent.stdout, silent.stderr) == (True, "", "")  # read's time was up
    node.sshd_continue()
    assert eventually(lambda: banner(lab.head, "node1").startswith("SSH-2.0-"))
    node.sshd_kill()
    assert "Connection refused" in lab.head.run(["bash", "-c", BANNER, "node1", "0.3"]).stderr
    node.sshd_start()
    assert banner(lab.head, "node1").startswith("SSH-2.0-")


@pytest.mark.slow
def test_a_new_host_key_is_refused_until_the_first_one_is_back(lab: Lab) -> None:
    node = lab.nodes[0]
    node.new_host_key()
    node.new_host_key()
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in ssh(lab.head, "node1", "true").stderr
    lab.restore()
    assert ssh(lab.head, "node1", "true").returncode == 0


@pytest.mark.slow
def test_a_port_is_refused_or_dropped_until_rules_are_cleared(lab: Lab) -> None:
    node = lab.nodes[0]
    node.refuse_port(22)
    assert "Connection refused" in ssh(lab.head, "node1", "true").stderr
    node.clear()
    node.drop_port(22)
    with pytest.raises(subprocess.TimeoutExpired):
        lab.head.run(["bash", "-c", BANNER, "node1", "0.3"], timeout=QUIET_S)
    node.clear()
    assert banner(lab.head, "node1").startswith("SSH-2.0-")


@pytest.mark.slow
def test_what_comes_from_one_host_is_dropped_until_rules_are_cleared(lab: Lab) -> None:
    node = lab.nodes[0]
    node.drop_from(lab.head.address)
    with pytest.raises(subprocess.TimeoutExpired):
        lab.head.run(["bash", "-c", BANNER, "node1", "0.3"], timeout=QUIET_S)
    assert banner(lab.nodes[1], "node1").startswith("SSH-2.0-")
    node.clear()
    assert banner(lab.head, "node1").startswith("SSH-2.0-")


@pytest.mark.slow
def test_limits_of_cpu_and_memory_hold(lab: Lab) -> None:
    node = lab.nodes[0]
    node.limit_memory(50_000_000)
    assert node.run([sys.executable, "-c", "b'x' * 100_000_000"]).returncode == -signal.SIGKILL
    node.limit_cpu(0.1)
    spin = (
        "import time; end = time.monotonic() + 0.5\n"
        "while time.monotonic() < end: pass\n"
        "print(time.process_time())"
    )
    assert float(node.run([sys.executable, "-c", spin]).stdout) < 0.25


@pytest.mark.slow
def test_restore_takes_back_every_fault_and_every_addition(lab: Lab) -> None:
    first, second, third, fourth = lab.nodes
    (first.home / ".ssh" / "config").write_text("Host *\n  Port 1\n")
    (first.home / ".ssh" / "known_hosts").write_text("")
    (first.home / ".bashrc").write_text("echo noise\n")
    (first.home / ".deepspeed_env").mkdir()
    first.run(["touch", "/tmp/mine", "/dev/shm/mine"], check=True)
    second.run(["ip", "addr", "add", "fd77::2/64", "dev", "eth0", "nodad"], check=True)
    second.run(["ip", "addr", "add", "172.17.0.1/16", "dev", "lo"], check=True)
    second.run(["ip", "route", "add", "10.99.0.1/32", "via", first.address], check=True)
    second.run(["ip", "addr", "del", f"{second.address}/16", "dev", "eth0"], check=True)
    first.unplug()
    second.freeze()
    third.drop_port(22)
    third.sshd_stop()
    third.link_down()
    fourth.poweroff()
    lab.head.sshd_kill()
    abandoned = lab.head.popen(["sleep", "1000"])
    lab.restore()
    assert abandoned.returncode == -signal.SIGKILL
    assert [host.condition() for host in lab.hosts] == ["up"] * 5
    assert sorted(path.name for path in (first.home / ".ssh").iterdir()) == [
        "authorized_keys",
        "id_ed25519",
        "id_ed25519.pub",
        "known_hosts",
    ]
    assert "mine" not in first.run(["ls", "/tmp", "/dev/shm"]).stdout
    addresses = second.run(["ip", "-o", "addr", "show"]).stdout.splitlines()
    assert {line.split()[3] for line in addresses} - {"::1/128"} == {"127.0.0.1/8", f"{second.address}/16"}
    (route,) = second.run(["ip", "route", "show"]).stdout.splitlines()
    assert route.startswith("10.77.0.0/16 dev eth0 proto kernel")
    assert not (first.home / ".bashrc").exists()
    assert eventually(lambda: ssh(first, "node4", "hostname").stdout == "node4\n")
    for host in lab.hosts:
        assert eventually(lambda name=host.name: banner(first, name) != "")  # type: ignore[misc]

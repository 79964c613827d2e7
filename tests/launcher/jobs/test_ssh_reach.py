"""MASTER_ADDR on several real hosts: an address that every node reaches,
or a clear word on who reaches none.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Host, Lab
from tests.launcher.command import Command

pytestmark = pytest.mark.slow

SHOW = """
import json, os, socket, sys
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if "--listen" in sys.argv and os.environ["RANK"] == "0":  # as torch's store does, but without SO_REUSEADDR
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    server.bind(("", port))
print(json.dumps({"host": os.uname().nodename, "address": address, "port": port}))
"""


@pytest.fixture
def folder(folder: Path, lab: Lab) -> Path:
    (folder / "show.py").write_text(SHOW)
    (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes[:3]))
    return folder


LIST_ADDRESSES = (
    "from dslaunch.launcher.node.system.own_addresses import own_addresses as own; print(*own(), sep='\\n')"
)


def ip(host: Host, words: str) -> None:
    """Run the `ip` command on a host; the lab takes addresses and routes back after the test."""
    host.run(["ip", *words.split()], check=True)


def add_bridge_address(host: Host) -> None:
    """Docker's: the same one on every host, and the first one that is listed."""
    ip(host, "addr add 172.17.0.1/16 dev lo")
    assert host.run([sys.executable, "-c", LIST_ADDRESSES], check=True).stdout.startswith("172.17.0.1\n")


def addresses(command: Command) -> set[str]:
    """MASTER_ADDR of every rank of a job that ends well."""
    assert command.wait() == 0, command.err
    return {json.loads(line.partition(" | ")[2])["address"] for line in command.out.splitlines()}


def checked(lab: Lab, folder: Path) -> tuple[dict[str, Any], list[dict[str, str] | None]]:
    """What `dslaunch check` says of rank 0's address, and which addresses each host reached."""
    command = Command(lab.head, folder, "check", "-H", "hosts", "--no_torch", "--json")
    assert command.wait() == 0, command.err
    report = json.loads(command.out)
    return report["master"], [one["reach"] for one in report["hosts"]]


def test_an_address_that_every_host_has_for_itself_is_not_chosen(lab: Lab, folder: Path) -> None:
    """The name that ssh reaches node1 by leads to an address that the others cannot use."""
    for node in lab.nodes:
        add_bridge_address(node)
    node = lab.host("node1")
    ip(node, "addr add 10.99.0.1/32 dev eth0")  # only the head has a way there
    ip(lab.head, f"route add 10.99.0.1/32 via {node.address}")
    key = lab.head.run(["ssh-keyscan", "-t", "ed25519", "10.99.0.1"], check=True).stdout
    with (lab.head.home / ".ssh" / "known_hosts").open("a") as file:
        file.write(key)
    (folder / "hosts").write_text("10.99.0.1 slots=1\nnode2 slots=1\nnode3 slots=1\n")
    command = Command(lab.head, folder, "-H", "hosts", "show.py")
    assert addresses(command) == {node.address}
    assert f"dslaunch: MASTER_ADDR={node.address}, because 10.99.0.1 " in command.err
    master, reach = checked(lab, folder)
    assert master["address"] == node.address, "a check says the same"
    assert master["candidates"][:2] == ["10.99.0.1", "172.17.0.1"]
    assert reach[0] is None
    assert all(one["172.17.0.1"] and one["10.99.0.1"] and not one[node.address] for one in reach[1:])


def test_the_address_that_ssh_reached_is_tried_only(lab: Lab, folder: Path) -> None:
    """Nothing of the trial is left on the port; it is one that no other test used a minute ago."""
    for node in lab.nodes:
        add_bridge_address(node)
    command = Command(lab.head, folder, "-H", "hosts", "--master_port=29611", "show.py", "--listen")
    assert addresses(command) == {lab.host("node1").address}, command.err
    assert "MASTER_ADDR" not in command.err


def test_who_reaches_no_address_is_named_and_nothing_starts(lab: Lab, folder: Path) -> None:
    node = lab.host("node1")
    node.refuse_port(29500, source=lab.host("node3").address)
    command = Command(lab.head, folder, "-H", "hosts", "show.py")
    assert command.wait() == 3, command.err
    (line,) = [one for one in command.err.splitlines() if "no GPU here" not in one]
    assert line.startswith("dslaunch: node3: cannot reach node1, where rank 0 will listen on port 29500: ")
    assert f"{node.address} refused the connection" in line
    assert command.out == ""
    assert lab.wait_until_clean() == []


@pytest.mark.exhaustive
def test_a_port_behind_a_firewall_is_said_and_not_waited_for_without_end(lab: Lab, folder: Path) -> None:
    lab.host("node1").drop_port(29500)
    command = Command(lab.head, folder, "-H", "hosts", "show.py")
    assert command.wait() == 3, command.err
    assert time.monotonic() - command.began_at < 20
    assert "dslaunch: node[2-3]: cannot reach node1, where rank 0 will listen" in command.err, command.err
    assert f"{lab.host('node1').address} did not answer within 5 s" in command.err


def test_hosts_that_have_ipv6_only(lab: Lab, folder: Path) -> None:
    """The head reaches them by both; among themselves they have IPv6 only."""
    nodes = [lab.host("node1"), lab.host("node2")]
    for place, host in enumerate([lab.head, *nodes]):
        ip(host, f"addr add fd78::{place + 1}/64 dev eth0 nodad")
    keys = ""
    for place, node in enumerate(nodes):
        keys += lab.head.run(["ssh-keyscan", "-t", "ed25519", f"fd78::{place + 2}"], check=True).stdout
        ip(node, f"addr del {node.address}/16 dev eth0")
    with (lab.head.home / ".ssh" / "known_hosts").open("a") as file:
        file.write(keys)
    (folder / "hosts").write_text("[fd78::2] slots=1\n[fd78::3] slots=1\n")
    command = Command(lab.head, folder, "-H", "hosts", "show.py")
    assert addresses(command) == {"fd78::2"}

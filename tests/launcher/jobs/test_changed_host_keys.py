"""A host key that has changed is refused, also where `StrictHostKeyChecking no` takes it: by our own SSH, by
the system's ssh, on the way through other hosts, and by gateways.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.launcher.errors import EXIT_HOST
from tests.lab import Lab
from tests.launcher.command import BOTH_WAYS, Command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("way")]


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "show.py").write_text('import os; print("rank", os.environ["RANK"], flush=True)')
    return folder


WAYS = {
    "the host itself": "",
    "a jump": "Host node4\n  ProxyJump node1\n",
    "the first of two jumps": "Host node4\n  ProxyJump node1,node2\n",
    "the jump of a jump": "Host node4\n  ProxyJump node2\nHost node2\n  ProxyJump node1\n",
}


@BOTH_WAYS
@pytest.mark.parametrize(
    "what", [one if one == "a jump" else pytest.param(one, marks=pytest.mark.exhaustive) for one in WAYS]
)
def test_a_changed_key_is_refused_wherever_it_is_met(what: str, lab: Lab, folder: Path) -> None:
    config = lab.head.home / ".ssh" / "config"
    config.write_text(f"{WAYS[what]}Host *\n  StrictHostKeyChecking no\n")
    host = "node4" if WAYS[what] else "node1"
    known = lab.head.home / ".ssh" / "known_hosts"
    lines = known.read_text().splitlines(keepends=True)
    known.write_text("".join(one for one in lines if not one.startswith("node2,")))  # which is taken, as ever
    lab.host("node1").new_host_key()
    command = Command(lab.head, folder, "-H", "hosts", "-i", host, "show.py")
    assert command.wait() == EXIT_HOST
    assert "its host key has CHANGED" in command.err


def test_a_gateway_takes_no_changed_key_either(lab: Lab, folder: Path) -> None:
    """It says so, and leaves the host to the launcher, whose known_hosts has the new key."""
    for node in lab.nodes:
        (node.home / ".ssh" / "config").write_text("Host *\n  StrictHostKeyChecking no\n")
    lab.host("node2").new_host_key()
    new = lab.host("node2").run(["cat", "/etc/ssh/ssh_host_ed25519_key.pub"]).stdout
    known = lab.head.home / ".ssh" / "known_hosts"
    lines = known.read_text().splitlines(keepends=True)
    known.write_text("".join(one for one in lines if not one.startswith("node2,")) + f"node2 {new}")
    words = ("-H", "hosts", "-i", "node1@node2", "--tree_above=1", "show.py")
    command = Command(lab.head, folder, *words)
    assert command.wait() == 0, command.err
    assert "node1: cannot reach node2 (" in command.err
    assert command.out.count("rank ") == 4

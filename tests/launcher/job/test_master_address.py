from __future__ import annotations

import pytest

from dslaunch.launcher.job.master_address import is_for_others, master_address


@pytest.mark.parametrize(
    ("reached_at", "address_to_peers", "expected"),
    [
        pytest.param("10.0.0.5", "10.0.0.1", "10.0.0.5", id="as SSH reached node 0"),
        pytest.param(
            "fe80::5%eth0", "", "fe80::5", id="without the interface, which is another one elsewhere"
        ),
        pytest.param("", "10.0.0.1", "10.0.0.1", id="node 0 is this machine"),
        pytest.param("127.0.0.1", "10.0.0.1", "10.0.0.1", id="node 0 is reached through a tunnel"),
        pytest.param("127.0.0.1", "127.0.0.1", "127.0.0.1", id="all are"),
        pytest.param("", "", "node0", id="nothing is known"),
        pytest.param("UNKNOWN", "10.0.0.1", "10.0.0.1", id="sshd does not know"),
        pytest.param("UNKNOWN", "", "node0", id="sshd does not know, nor do we"),
    ],
)
def test_the_address_that_is_tried_first(reached_at: str, address_to_peers: str, expected: str) -> None:
    found = master_address(
        is_one_machine=False, reached_at=reached_at, address_to_peers=address_to_peers, hostname="node0"
    )
    assert found == expected


def test_one_machine_needs_no_network() -> None:
    found = master_address(is_one_machine=True, reached_at="10.0.0.5", address_to_peers="", hostname="node0")
    assert found == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "expected"),
    [("10.0.0.5", True), ("fd00::1", True), ("127.0.0.9", False), ("::1", False), ("", False), ("a", False)],
)
def test_who_else_can_use_an_address(address: str, expected: bool) -> None:
    assert is_for_others(address) is expected

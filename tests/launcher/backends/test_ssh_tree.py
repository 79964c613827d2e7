"""What is said of a gateway whose streams end."""

from __future__ import annotations

from typing import Any

from dslaunch.launcher.backends.channel import Ways
from dslaunch.launcher.backends.ssh_config import Target
from dslaunch.launcher.backends.ssh_tree import SshTree
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.job.gateways import Group
from dslaunch.launcher.job.plan import NodePlan


class EndedStream:
    """A login that has ended by itself; that the connection goes with it is not known yet."""

    local_address = "10.0.0.1"
    is_connected = True

    def read(self) -> bytes:
        return b""

    def write(self, data: bytes) -> None:
        pass

    def error_text(self) -> str:
        return ""

    def exit_status(self) -> int:
        return 3

    def hang_up(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeLogin:
    def open(self, python: str, prefix: tuple[str, ...] = ()) -> Any:
        return EndedStream()

    def hold(self) -> None:
        pass

    def release(self) -> None:
        pass


def node(rank: int) -> NodePlan:
    host = Host(name=f"node{rank}", slots=1)
    return NodePlan(node_rank=rank, host=host, is_local=False, devices=(), ranks=())


def test_the_end_of_a_relay_with_nobody_behind_it_is_no_reason() -> None:
    gateway, child = node(0), node(1)
    target = Target("10.0.0.2", 22, "ada", (), False, "node1", (), "refuse", None, (), 1.0)
    direct: list[NodePlan] = []
    ways = Ways(connect=lambda node: direct.append(node), log_in=lambda node: FakeLogin())  # type: ignore[arg-type,return-value,func-returns-value]
    said: list[str] = []
    tree = SshTree([Group(gateway, (child,))], {1: target}, ways, window=1, heartbeat_s=10.0, say=said.append)
    channel = tree.connect(gateway)
    tree.connect(child)
    assert direct == [child]
    assert len(said) == 1
    assert channel.read() == b""  # and its status says why
    assert channel.exit_status() == 3

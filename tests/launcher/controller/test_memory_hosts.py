"""Hosts with snapshots in memory: all of them, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dslaunch.launcher.controller.memory_hosts import introduce
from dslaunch.shared import variables


def _host(name: str, port: int, sent: list[str]) -> Any:
    return SimpleNamespace(
        name=name,
        plan=SimpleNamespace(role="", host=SimpleNamespace(rack="")),
        hello=None,
        ready=SimpleNamespace(memory_port=port, memory_addresses=["10.0.0.1"]),
        send=lambda frame: sent.append(f"{frame.name} to {frame.partner}"),
    )


def test_where_one_host_has_no_memory_no_rank_takes_snapshots() -> None:
    """A snapshot is a matter of all ranks: some of them alone would wait for the others."""
    plan: Any = SimpleNamespace(snapshot_every="5", attempt=0)
    sent: list[str] = []
    said: list[str] = []
    console: Any = SimpleNamespace(say=said.append)
    assert introduce([_host("a", 1, sent), _host("b", 2, sent)], plan, console) == {}
    assert (sent, said) == (["a to b", "b to a"], [])
    assert introduce([_host("a", 1, sent), _host("b", 0, sent)], plan, console) == {variables.MEMORY: ""}
    assert len(sent) == 2
    assert said == ["--snapshot_every: no snapshots are taken, since there is no memory for them on b"]

"""The hosts whose agents hold snapshots: each is told of the others, and of its partner, before the start."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from ...shared import variables
from ..job.partners import partners_of
from ..job.plan import Plan
from ..output.console import Console
from ..wire.frames import MemoryHosts
from .roster import HostState

LOOPBACK = "127.0.0.1"


def introduce(roster: Iterable[HostState], plan: Plan, console: Console) -> dict[str, str]:
    """Tell the agents of the trainers who the others are, if the job has snapshots. Return variables for all
    workers: without a memory on each host none takes part in snapshots, which all ranks make or none.
    """
    if not plan.snapshot_every:
        return {}
    trainers = [one for one in roster if not one.plan.role]
    hosts = [one for one in trainers if one.ready is not None and one.ready.memory_port]
    if len(hosts) < len(trainers):
        missing = ", ".join(one.name for one in trainers if one not in hosts)
        console.say(
            f"--snapshot_every: no snapshots are taken, since there is no memory for them on {missing}"
        )
        return {variables.MEMORY: ""}
    if len(hosts) == 1 and not plan.attempt:
        console.say(f"--snapshot_every: snapshots are in the memory of {hosts[0].name} alone, the only host")
    token = secrets.token_hex(16)
    machines = {one.hello.machine for one in hosts if one.hello is not None}
    is_one_machine = len(machines) == 1 and "" not in machines
    peers = [
        [one.name, _addresses(one, is_one_machine=is_one_machine), one.ready.memory_port]
        for one in hosts
        if one.ready is not None
    ]
    partners = partners_of([one.plan.host.rack for one in hosts])
    for host, place in zip(hosts, partners, strict=True):
        partner = "" if place is None else hosts[place].name
        host.send(MemoryHosts(host.name, peers, partner, token))
    return {}


def _addresses(host: HostState, *, is_one_machine: bool) -> list[str]:
    """Return the addresses at which other hosts may reach the host, best first."""
    found = [] if host.hello is None else [host.hello.reached_at]
    found += [] if host.ready is None else host.ready.memory_addresses
    found += [LOOPBACK] if is_one_machine else []
    found += [] if host.hello is None else [host.hello.hostname]
    return [one for one in dict.fromkeys(found) if one]

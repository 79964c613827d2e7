"""A plan as text: the output of --dry_run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial

from ..inputs.env_file import EnvEntry, is_secret
from ..node.observe.core_binding import format_ranges
from ..wording import count
from .master_address import LOOPBACK
from .mesh import describe as describe_mesh
from .plan import Plan, overruled, python_of


def describe(
    plan: Plan,
    *,
    how: str | None = None,
    gateways: Mapping[int, str] | None = None,
) -> str:
    """Write the plan as text: every host with its ranks, devices and command.

    `how`: the way in which the ranks start, if not by an agent.

    `gateways`: the name of the gateway of each host that is reached through one, by the host's node_rank.
    """
    unused = frozenset(overruled(plan))
    is_alone = len(plan.nodes) == 1
    address = plan.master.address or (LOOPBACK if is_alone else "node 0's address as the others reach it")
    or_next = "" if plan.master.is_port_fixed else " or another that is free"
    lines = [
        f"{count(plan.world_size, 'rank')} on {count(len(plan.nodes), 'host')}, in {plan.cwd}",
        f"master: {address}, port {plan.master.port}{or_next}",
    ]
    if plan.hosts_from:
        lines.append(f"hosts: found in {plan.hosts_from}")
    if plan.mesh is not None:
        estimate = plan.mesh_estimate
        sent = None if estimate is None else partial(estimate.sent_bytes, plan.mesh)
        lines += describe_mesh(plan.mesh, plan.host_slots, sent)
        lines += [] if estimate is None else [f"  {estimate.describe(plan.mesh)}"]
    if plan.bind_cores is not None:
        cores = format_ranges(list(plan.bind_cores)) or "one CPU of each physical core"
        lines.append(f"each rank is bound to its share of its host's cores: {cores}")
    if plan.venv_script:
        lines.append(f"first, on every host: source {shlex.quote(plan.venv_script)}")
    lines += [f"environment: {_shown(entry, unused)}" for entry in plan.environment]
    for node in plan.nodes:
        way = how or ("here, without ssh" if node.is_local else "by ssh")
        if gateways and node.node_rank in gateways:
            way += f" through {gateways[node.node_rank]}"
        folder = f", in {node.host.cwd}" if node.host.cwd else ""
        lines.append(
            f"host {node.host.name} (node {node.node_rank}, {way}), devices {','.join(node.devices)}{folder}"
        )
        lines += [f"  environment: {_shown(entry, unused)}" for entry in node.host.env]
        python = python_of(plan, node.host)
        if node.host.exec_prefix:
            lines.append(f"  inside: {shlex.join(node.host.exec_prefix)}")
        for rank in node.ranks:
            words = ([] if python is None else [python or "python"]) + list(rank.arguments)
            place = plan.place_of(rank.rank)
            where = f" ({place})" if place else ""
            lines.append(f"  rank {rank.rank}{where}, local rank {rank.local_rank}: {shlex.join(words)}")
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def _shown(entry: EnvEntry, unused: frozenset[EnvEntry]) -> str:
    value = "".join(f"${{{part}}}" if place % 2 else part for place, part in enumerate(entry.value))
    why_not = ", not used: every rank gets its own" if entry in unused else ""
    return f"{entry.name}={'***' if is_secret(entry.name) else value!r} (from {entry.source}{why_not})"

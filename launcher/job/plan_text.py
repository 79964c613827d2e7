"""A plan as text: the output of --dry_run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial

from ..inputs.env_file import EnvEntry, is_secret
from ..node.observe.core_binding import format_ranges
from ..options.roles import Role
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
    lines += map(_of_role, plan.roles)
    if plan.bind_cores is not None:
        cores = format_ranges(list(plan.bind_cores)) or "one CPU of each physical core"
        lines.append(f"each rank is bound to its share of its host's cores: {cores}")
    if plan.venv_script:
        lines.append(f"first, on every host: source {shlex.quote(plan.venv_script)}")
    lines += [f"environment: {_shown(entry, unused)}" for entry in plan.environment]
    for node in plan.all_nodes:
        way = how or ("here, without ssh" if node.is_local else "by ssh")
        if gateways and node.node_rank in gateways:
            way += f" through {gateways[node.node_rank]}"
        folder = f", in {node.host.cwd}" if node.host.cwd else ""
        what = node.role or f"node {node.node_rank}"
        lines.append(f"host {node.host.name} ({what}, {way}), devices {','.join(node.devices)}{folder}")
        lines += [f"  environment: {_shown(entry, unused)}" for entry in node.host.env]
        python = python_of(plan, node.host)
        if node.host.exec_prefix:
            lines.append(f"  inside: {shlex.join(node.host.exec_prefix)}")
        if node.role:
            lines.append(f"  {node.role}: {plan.role_of(node).command}")
        for rank in () if node.role else node.ranks:
            words = ([] if python is None else [python or "python"]) + list(rank.arguments)
            place = plan.place_of(rank.rank)
            where = f" ({place})" if place else ""
            lines.append(f"  rank {rank.rank}{where}, local rank {rank.local_rank}: {shlex.join(words)}")
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def _of_role(role: Role) -> str:
    """Describe when the trainers start, and what the end of a server means."""
    words = []
    if role.health is not None:
        words.append(f"the trainers wait until it answers at {role.health.text}")
    if role.max_restarts:
        words.append(f"started again when it ends, {count(role.max_restarts, 'time')}")
    if role.may_end:
        words.append("may end with 0")
    return f"role {role.name}: {'; '.join(words) or 'its end before that of the trainers ends the job'}"


def _shown(entry: EnvEntry, unused: frozenset[EnvEntry]) -> str:
    value = "".join(f"${{{part}}}" if place % 2 else part for place, part in enumerate(entry.value))
    why_not = ", not used: every rank gets its own" if entry in unused else ""
    return f"{entry.name}={'***' if is_secret(entry.name) else value!r} (from {entry.source}{why_not})"

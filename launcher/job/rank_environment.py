"""The variables that each rank would get, with their sources. They are found from the plan alone, without
asking a host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...shared import variables
from ..inputs.env_file import EnvEntry, is_secret
from .master_address import LOOPBACK
from .plan import NodePlan, Plan, RankPlan, environment_of
from .server_plan import hosts_variables

OURS = "dslaunch"
MASK = "***"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """`value` is the text to show; a value that only the hosts know is described in parentheses."""

    name: str
    value: str
    source: str
    replaced: tuple[str, ...] = ()  # sources of values that this one replaced


def variables_of(plan: Plan, node: NodePlan, rank: RankPlan, *, shows_secrets: bool) -> tuple[Variable, ...]:
    """Return all variables of one rank that do not come from the host itself, by name."""
    found: dict[str, Variable] = {}

    def add(name: str, value: str, source: str) -> None:
        before = found.get(name)
        replaced = () if before is None else (*before.replaced, before.source)
        found[name] = Variable(name=name, value=value, source=source, replaced=replaced)

    for entry in environment_of(plan, node.host):
        add(entry.name, _value_of(entry, shows_secrets=shows_secrets), entry.source)
    num_local = len(node.devices)
    add(variables.DEVICES, repr(",".join(node.devices)), f"{OURS}, {variables.WITH_GPUS}")
    if variables.CONNECTIONS not in found:
        why = f"{OURS}, {variables.WITH_GPUS_UNSET}"
        add(variables.CONNECTIONS, repr(variables.MAX_CONNECTIONS), why)
    if variables.THREADS not in found and num_local > 1:
        why = f"{OURS}, {variables.WITHOUT_GPUS_UNSET}"
        add(variables.THREADS, f"(the host's cores / {num_local})", why)
    add(variables.MASTER_ADDR, _master_addr(plan), OURS)
    or_another = "" if plan.master.is_port_fixed else " (or another, if that is in use)"
    add(variables.MASTER_PORT, f"{str(plan.master.port)!r}{or_another}", OURS)
    add(variables.ERROR_FILE, "(a file of this rank's own)", OURS)
    add(variables.PLACE_FILE, "(a file of this rank's own)", OURS)
    if plan.metrics_interval_s:
        add(variables.METRICS_PIPE, "(a pipe of this host's own)", OURS)
        add(variables.METRICS_INTERVAL, repr(f"{plan.metrics_interval_s:g}"), OURS)
    if plan.has_milestones:
        add(variables.MILESTONES, "(a pipe of this host's own)", OURS)
    for name, value in _files_of_host(plan):
        add(name, value, OURS)
    if any(name == variables.TRACE for name, _ in rank.env):
        add(variables.TRACE_FILE, "(files of this rank's own)", OURS)
        if variables.PROFILER_LOG not in found:
            add(variables.PROFILER_LOG, repr(variables.PROFILER_LOG_QUIET), f"{OURS}, {variables.UNSET}")
    for name in hosts_variables(plan, dict.fromkeys(range(len(plan.all_nodes)), "")):
        add(name, "(the addresses of the hosts)", OURS)
    for name, value in rank.env:
        add(name, "(a name that each run gets)" if name == "TORCHELASTIC_RUN_ID" else repr(value), OURS)
    return tuple(sorted(found.values(), key=lambda one: one.name))


def _files_of_host(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the variables that name a file which a host makes for all of its ranks."""
    if plan.snapshot_every:
        yield variables.MEMORY, "(a socket of this host's own)"
    if plan.elastic.is_on:
        yield variables.RESIZE_FILE, "(a file of this host's own, there when the hosts change)"


def describe(plan: Plan, *, only_rank: int | None = None, shows_secrets: bool = False) -> str:
    """Describe the variables of one rank, or of all ranks, where variables with the same value on all are
    shown once.
    """
    of_rank = {
        rank.rank: variables_of(plan, node, rank, shows_secrets=shows_secrets)
        for node in plan.nodes
        for rank in node.ranks
        if only_rank in (None, rank.rank)
    }
    lines = ["No host was contacted: ${NAME} is replaced on each host, and what a host sets by itself stays."]
    if plan.venv_script:
        lines.append(f"First, on every host: source {plan.venv_script}")
    shared = _shared(list(of_rank.values()))
    lines += _section(_title(plan, only_rank), shared)
    for node in plan.nodes:
        of_node = [of_rank[rank.rank] for rank in node.ranks if rank.rank in of_rank]
        here = [one for one in _shared(of_node) if one not in shared]
        if len(of_node) > 1:
            lines += _section(f"every rank on {node.host.name}", here)
            here += shared
        else:
            here = list(shared)
        for rank in node.ranks:
            own = [one for one in of_rank.get(rank.rank, ()) if one not in here]
            lines += _section(f"rank {rank.rank}, on {node.host.name}", own)
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def _title(plan: Plan, only_rank: int | None) -> str:
    if only_rank is None:
        return "every rank" if plan.world_size > 1 else "rank 0"
    node = next(one for one in plan.nodes if any(rank.rank == only_rank for rank in one.ranks))
    return f"rank {only_rank}, on {node.host.name}"


def _value_of(entry: EnvEntry, *, shows_secrets: bool) -> str:
    if is_secret(entry.name) and not shows_secrets:
        return MASK
    return repr("".join(f"${{{part}}}" if place % 2 else part for place, part in enumerate(entry.value)))


def _master_addr(plan: Plan) -> str:
    if plan.master.address is not None:
        return repr(plan.master.address)
    if all(node.is_local for node in plan.nodes) or len(plan.nodes) == 1:
        return repr(LOOPBACK)
    return "(the address of node 0 that all others reach)"


def _shared(of_ranks: Sequence[tuple[Variable, ...]]) -> list[Variable]:
    """Return the variables that are the same for all of these ranks, in order."""
    first, *others = of_ranks or [()]
    sets: list[Mapping[Variable, None]] = [dict.fromkeys(one) for one in others]
    return [variable for variable in first if all(variable in one for one in sets)]


def _section(title: str, variables: Iterable[Variable]) -> list[str]:
    lines = []
    for one in variables:
        before = f"; set before by {', '.join(one.replaced)}" if one.replaced else ""
        lines.append(f"  {one.name}={one.value}  (from {one.source}{before})")
    return ["", f"{title}:", *lines] if lines else []

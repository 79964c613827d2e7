"""CPU cores for each worker of a host."""

from __future__ import annotations

import os

from ..system.kernel_file import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ...wire.fast_tuple import Record as NamedTuple


class Core(NamedTuple):
    """A CPU as the kernel counts them. Of the CPUs that share a physical core, `thread` counts from 0."""

    cpu: int
    node: int  # NUMA
    thread: int


def read_cores(allowed: set[int], sys: str = "/sys") -> list[Core]:
    """Return the allowed CPUs with their place in the machine; without /sys each is a core of node 0."""
    nodes = {}
    folder = os.path.join(sys, "devices", "system", "node")
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name.startswith("node") and name[4:].isdigit():
            for cpu in parse_ranges(read_text(os.path.join(folder, name, "cpulist"))):
                nodes[cpu] = int(name[4:])
    cores = []
    for cpu in sorted(allowed):
        path = os.path.join(sys, "devices", "system", "cpu", f"cpu{cpu}", "topology", "thread_siblings_list")
        siblings = [one for one in parse_ranges(read_text(path)) if one in allowed]
        cores.append(Core(cpu, nodes.get(cpu, 0), siblings.index(cpu) if cpu in siblings else 0))
    return cores


def share_cores(cores: list[Core], num_ranks: int, *, uses_all: bool) -> list[list[int]]:
    """Return equal shares, one for each rank; empty if there are fewer cores than ranks.

    Unless `uses_all`, one CPU of each physical core is used, as long as that gives every rank one. A rank
    stays within one NUMA node, or has whole ones, if the numbers allow it.
    """
    firsts = [core for core in cores if core.thread == 0]
    if not uses_all and len(firsts) >= num_ranks:
        cores = firsts
    by_node: dict[int, list[int]] = {}
    for core in sorted(cores, key=lambda one: (one.node, 0 if uses_all else one.thread, one.cpu)):
        by_node.setdefault(core.node, []).append(core.cpu)
    nodes = list(by_node.values())
    is_even = len({len(node) for node in nodes}) == 1
    if is_even and num_ranks % len(nodes) == 0 and len(nodes[0]) * len(nodes) >= num_ranks:
        ranks_per_node = num_ranks // len(nodes)
        return [share for node in nodes for share in _cut(node, ranks_per_node)]
    return _cut([cpu for node in nodes for cpu in node], num_ranks)


def share_near(cores: list[Core], near: list[set[int]], *, uses_all: bool) -> list[list[int]]:
    """Share as `share_cores` does, but each rank has cores of its own set in `near`; ranks of equal sets
    share them.

    Empty if some rank would have no core that way. All shares have the size of the smallest.
    """
    groups: dict[frozenset[int], list[int]] = {}
    for rank, nearest in enumerate(near):
        groups.setdefault(frozenset(core.cpu for core in cores if core.cpu in nearest), []).append(rank)
    if sum(len(cpus) for cpus in groups) > len(frozenset().union(*groups)):  # some sets overlap in part
        return []
    shares: dict[int, list[int]] = {}
    for cpus, ranks in groups.items():
        own = [core for core in cores if core.cpu in cpus]
        for place, share in enumerate(share_cores(own, len(ranks), uses_all=uses_all)):
            shares[ranks[place]] = share
    size = min(len(shares.get(rank, ())) for rank in range(len(near)))
    return [shares[rank][:size] for rank in range(len(near))] if size else []


def _cut(cpus: list[int], num_shares: int) -> list[list[int]]:
    size = len(cpus) // num_shares
    return [cpus[start : start + size] for start in range(0, size * num_shares, size)] if size else []


def parse_ranges(text: str) -> list[int]:
    """Return the numbers of `0,2-4`. Errors: ValueError if the text has another form"""
    numbers: list[int] = []
    for item in text.strip().split(",") if text.strip() else ():
        first, dash, last = item.partition("-")
        numbers += range(int(first), int(last if dash else first) + 1)
    return numbers


def format_ranges(numbers: list[int]) -> str:
    """Write ascending numbers as `0,2-4`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

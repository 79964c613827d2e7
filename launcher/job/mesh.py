"""The ranks of a job along the axes of its parallelism, and their hosts. Arithmetic only.

Groups of ep are consecutive ranks among those that share a stage's other layers (dp x sp), so ep is not a
factor of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ...shared.axes import AXES, ORDER, SAMPLES, SEPARATOR, Axes, full_order, place_text
from ..errors import LaunchError
from ..inputs.selection import Selected
from ..options.mesh import MeshOptions
from ..options.restart import RestartOptions
from ..wording import count, shown_size
from .restart import Decision

INSIDE_A_HOST = ("tp", "sp")  # ranks wait for their traffic in every layer


class JobMesh(NamedTuple):
    """The size of each axis; the product of all but ep is the number of ranks."""

    pp: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    order: tuple[str, ...] = ORDER  # all but ep, the outermost first

    @property
    def text(self) -> str:
        """Return the mesh as --mesh takes it: dp, and all axes of more than one rank."""
        sizes = {name: self.size(name) for name in (*ORDER, "ep") if name == "dp" or self.size(name) > 1}
        order = () if self.order == ORDER else tuple(name for name in self.order if self.size(name) > 1)
        return _text(sizes, order)

    def size(self, name: str) -> int:
        """Return the number of ranks along this axis."""
        return int(getattr(self, name))

    def stride(self, name: str) -> int:
        """Return the difference between the ranks of neighbours along this axis."""
        if name == "ep":
            first, second, *_ = (*self.lines("ep")[0], 0)
            return max(1, second - first)
        return prod(self.size(inner) for inner in self.order[self.order.index(name) + 1 :])

    @property
    def axes(self) -> Axes:
        """Return the axes without ep."""
        return Axes(pp=self.pp, dp=self.dp, sp=self.sp, tp=self.tp, order=self.order)

    def lines(self, name: str) -> list[tuple[int, ...]]:
        """Return all lines along this axis, each rank in one of them. Groups of ep are consecutive among the
        ranks with the same layers.
        """
        if name != "ep":
            return sorted(self.axes.lines((name,)))
        starts = range(0, self.dp * self.sp, self.ep)
        return sorted(line[start : start + self.ep] for line in self.axes.lines(SAMPLES) for start in starts)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the job."""
        return self.pp * self.dp * self.sp * self.tp

    def place(self, rank: int) -> str:
        """Return where the rank is, for messages: "stage 1 of 2, dp 0"; axes of one rank are left out.
        Return "" if dp is the only axis, or the job has no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            return ""
        axes = self.axes
        place_of_experts = axes.line_of(rank, SAMPLES).index(rank) % self.ep
        sizes = {name: self.size(name) for name in AXES}
        return place_text({**axes.coordinates(rank), "ep": place_of_experts}, sizes)


class HostSlots(NamedTuple):
    """A host of the job, and the number of its ranks."""

    name: str
    num_ranks: int


def make_mesh(options: MeshOptions, num_ranks: int, *, may_shrink: bool = False) -> JobMesh | None:
    """Return the mesh of so many ranks, None if no mesh was asked for. `may_shrink`: the given dp may be
    larger, because it was given for more hosts.

    Errors: LaunchError if the axes and the number of ranks do not fit
    """
    given = dict(options.sizes)
    if not given:
        return None
    shown = f"--mesh={_text(given, options.order)}"
    inner = _num_inner(given)
    if num_ranks % inner:
        raise LaunchError(
            f"{shown}: {_inner_text(given)} is {count(inner, 'rank')}, which does not divide the job's "
            f"{num_ranks}; give other sizes, or another number of slots"
        )
    sizes: dict[str, Any] = {**given, "dp": num_ranks // inner}
    mesh = JobMesh(**sizes)
    mesh = mesh._replace(order=_order_of(options, mesh))
    if given.get("dp", mesh.dp) != mesh.dp and not may_shrink:
        raise LaunchError(
            f"{shown} is {count(inner * given['dp'], 'rank')}, and the job has {num_ranks}, one for each "
            f"slot of its hosts; leave dp out, which is then {mesh.dp}, or use --num_nodes and --num_gpus"
        )
    if mesh.dp * mesh.sp % mesh.ep:
        raise LaunchError(
            f"{shown}: ep={mesh.ep} does not divide dp x sp, which are {mesh.dp * mesh.sp}: experts are "
            "divided over the ranks that share the other layers; give a divisor"
        )
    return mesh


def _order_of(options: MeshOptions, mesh: JobMesh) -> tuple[str, ...]:
    """Return the order of all axes, those with one rank first: their place makes no difference.

    Errors: LaunchError if an axis of more ranks is left out
    """
    sizes = {name: mesh.size(name) for name in ORDER}
    left_out = [name for name in ORDER if sizes[name] > 1 and name not in options.order]
    if options.order and left_out:
        raise LaunchError(
            f"--mesh={_text(dict(options.sizes), options.order)}: its order leaves out {left_out[0]}, which "
            f"has {sizes[left_out[0]]} ranks; name all axes with more than one rank, the outermost first"
        )
    return full_order(options.order or ORDER, sizes)


def check_hosts(mesh: JobMesh, hosts: Sequence[HostSlots]) -> None:
    """If hosts differ in size, check that the axes which send in every layer lie in the same way on all.

    Errors: LaunchError that names a host whose number of ranks is not a multiple of such an axis
    """
    if len({host.num_ranks for host in hosts}) == 1:
        return
    for name in INSIDE_A_HOST:
        block = mesh.stride(name) * mesh.size(name)
        for host in hosts:
            if mesh.size(name) > 1 and host.num_ranks % block:
                raise LaunchError(
                    f"--mesh={mesh.text}: host {host.name} has {count(host.num_ranks, 'rank')}, which is no "
                    f"multiple of {block}, and the hosts have different numbers: {name} would cross from "
                    f"{host.name} to the next host; give it a multiple of {block} slots, or another {name}"
                )


def warnings_of(mesh: JobMesh, hosts: Sequence[HostSlots]) -> list[str]:
    """Return warnings of axes whose traffic is slow on these hosts, a sentence each."""
    found = []
    for name in INSIDE_A_HOST:
        crossing = _crossing(mesh, name, hosts)
        if crossing is not None:
            line, names = crossing
            hint = f"a smaller {name} stays inside a host, and pp or dp may take its place"
            if mesh.order != ORDER:
                hint = (
                    f"an order in which {name} stands further behind, or a smaller {name}, keeps it in a host"
                )
            found.append(
                f"--mesh={mesh.text}: {name} crosses hosts, first with ranks {line[0]} to {line[-1]} on "
                f"{' and '.join(names)}: what it sends in every layer goes over the network; {hint}"
            )
    return found


def describe(
    mesh: JobMesh, hosts: Sequence[HostSlots], sent_bytes: Callable[[str], float] | None = None
) -> list[str]:
    """Return the lines of a table of the axes, the innermost first. `sent_bytes`, if they were estimated,
    are the bytes that one rank sends along each axis in a step.
    """
    sizes = [name for name in mesh.order if mesh.size(name) > 1 or name == "dp"]
    shown = " x ".join(f"{name} {mesh.size(name)}" for name in sizes)
    rows: list[tuple[str, ...]] = [("axis", "size", "stride", "inside a host")]
    if sent_bytes is not None:
        rows[0] += ("sends per step and rank (estimate)",)
    for name in (*reversed(sizes), *(["ep"] if mesh.ep > 1 else [])):
        crossing = _crossing(mesh, name, hosts)
        where = "yes" if crossing is None else f"no: {crossing[1][0]}-{crossing[1][-1]}"
        row = (name, str(mesh.size(name)), str(mesh.stride(name)), where)
        rows.append(row if sent_bytes is None else (*row, shown_size(round(sent_bytes(name)))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"mesh: {shown} on {count(len(hosts), 'host')}",
        *(
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ),
    ]


def fit(decision: Decision, options: MeshOptions, restart: RestartOptions) -> Decision:
    """Return the next attempt with fewer hosts, where only dp may shrink: hosts that do not fit the other
    axes become spares.
    """
    attempt, given = decision.attempt, dict(options.sizes)
    if attempt is None or not given:
        return decision
    hosts = attempt.hosts
    minimum = len(hosts) if restart.min_nodes is None else max(1, restart.min_nodes)
    for num_hosts in range(len(hosts), minimum - 1, -1):
        try:
            mesh = make_mesh(options, _num_ranks(hosts[:num_hosts]), may_shrink=True)
        except LaunchError:
            continue
        why = [decision.why] if mesh is None else [decision.why, f"with {mesh.text}"]
        if num_hosts < len(hosts):
            names = ", ".join(one.host.name for one in hosts[num_hosts:])
            why.append(f"without {names}, for {_inner_text(given)} takes {_num_inner(given)} ranks")
        following = attempt._replace(hosts=hosts[:num_hosts], spares=hosts[num_hosts:] + attempt.spares)
        return Decision(attempt=following, why="; ".join(why))
    only = "" if restart.min_nodes is None else f" and --min_nodes is {restart.min_nodes}"
    return Decision(
        attempt=None,
        why=f"not started again: {count(len(hosts), 'host')} with {_num_ranks(hosts)} ranks are left{only}, "
        f"and of --mesh={_text(given, options.order)} only dp can shrink: {_inner_text(given)} takes "
        f"{_num_inner(given)} ranks",
    )


def _crossing(
    mesh: JobMesh, name: str, hosts: Sequence[HostSlots]
) -> tuple[tuple[int, ...], tuple[str, ...]] | None:
    """Return the first line along an axis whose ranks are on several hosts, and these hosts; None if there
    is no such line.
    """
    host_of = [host.name for host in hosts for _ in range(host.num_ranks)]
    for line in mesh.lines(name):
        names = tuple(dict.fromkeys(host_of[rank] for rank in line))
        if len(names) > 1:
            return line, names
    return None


def _num_ranks(hosts: Sequence[Selected]) -> int:
    return sum(len(one.devices) for one in hosts)


def _num_inner(given: Mapping[str, int]) -> int:
    """Return the number of ranks that hold one copy of the model together."""
    return prod(given.get(name, 1) for name in ORDER if name != "dp")


def _inner_text(given: Mapping[str, int]) -> str:
    return (
        " x ".join(f"{name}={given[name]}" for name in ORDER if name != "dp" and name in given) or "one copy"
    )


def _text(given: Mapping[str, int], order: Sequence[str] = ()) -> str:
    sizes = [f"{name}={size}" for name, size in given.items()]
    return ",".join([*sizes, *([f"order={SEPARATOR.join(order)}"] if order else [])])

"""Number of ranks that work together along each axis of the job's parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ...shared.axes import ORDER, full_order
from .keys.value import AxesInOrder, Positive
from .section import Section

FACTORS = ORDER  # factors of the number of ranks


class MeshConfig(Section):
    """The sizes of the axes; None: nothing was said."""

    pp: Positive | None = None
    """so many stages of a pipeline; `dslaunch --mesh` says the same for the whole job"""
    dp: Positive | None = None
    """so many groups of ranks with samples of their own; left out, what remains; `dslaunch --mesh` says the
    same for the whole job"""
    ep: Positive | None = None
    """so many ranks over which experts are divided; `dslaunch --mesh` says the same for the whole job"""
    sp: Positive | None = None
    """so many ranks over which each sample is divided; `dslaunch --mesh` says the same for the whole job"""
    tp: Positive | None = None
    """another spelling of tensor_parallel.autotp_size; `dslaunch --mesh` says the same for the whole job"""
    order: AxesInOrder | None = None  # the outermost first
    """which axes are inside which, the outermost first; left out, pp, dp, sp, tp. Axes of one rank may be
    left out; `dslaunch --mesh pp=2,order=dp-pp` says the same"""

    @property
    def given(self) -> dict[str, int]:
        """Sizes that were given, by axis."""
        sizes = {name: getattr(self, name) for name in type(self).model_fields if name != "order"}
        return {name: size for name, size in sizes.items() if size is not None}


def agree_on_mesh(
    sources: Mapping[str, Mapping[str, int]],
    *,
    num_ranks: int,
    problems: dict[str, str],
    orders: Mapping[str, Sequence[str]] | None = None,
) -> MeshConfig:
    """Return the sizes, and the order of the axes, that the sources, by what a message calls them, say
    together; what they contradict each other or the number of ranks in becomes a line of `problems`.
    """
    said: dict[str, tuple[str, int]] = {}
    for source, sizes in sources.items():
        for axis, size in sizes.items():
            before, known = said.setdefault(axis, (source, size))
            if known != size:
                problems[f"mesh.{axis}"] = (
                    f"{before} says {axis}={known}, and {source} says {axis}={size}; say the same in both, "
                    "or leave one out"
                )
    sizes = {axis: size for axis, (_, size) in said.items()}
    inner = prod(sizes.get(axis, 1) for axis in FACTORS if axis != "dp")
    where = " and ".join(dict.fromkeys(source for source, _ in said.values()))
    shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    if num_ranks % inner:
        problems.setdefault(
            "mesh", f"{where}: {shown} do not divide the {num_ranks} ranks of the job; give divisors"
        )
    elif sizes.get("dp", num_ranks // inner) != num_ranks // inner:
        problems.setdefault(
            "mesh",
            f"{where}: {shown} are {inner * sizes['dp']} ranks, and the job has {num_ranks}; name every axis "
            "in one place, and leave dp out there",
        )
    num_alike = num_ranks // prod(sizes.get(axis, 1) for axis in ("pp", "tp"))
    if num_alike % sizes.get("ep", 1):
        problems.setdefault(
            "mesh",
            f"{where}: {shown} leave {num_alike} ranks (dp x sp) with the same layers, which "
            f"ep={sizes['ep']} does not divide; give a divisor",
        )
    mesh = MeshConfig.model_validate(sizes)
    if any(key.startswith("mesh") for key in problems):
        return mesh
    every = {axis: sizes.get(axis, 1) for axis in FACTORS} | {"dp": num_ranks // inner}
    return mesh.model_copy(update={"order": _agree_on_order(orders or {}, every, problems)})


def _agree_on_order(
    orders: Mapping[str, Sequence[str]], sizes: Mapping[str, int], problems: dict[str, str]
) -> tuple[str, ...] | None:
    """Return the order of all axes, None if nothing was said."""
    said: dict[str, tuple[str, ...]] = {}
    for source, order in orders.items():
        try:
            said |= {source: full_order(order, sizes)} if order else {}
        except ValueError as error:
            problems["mesh.order"] = f"{source}: {error}"
    if len(set(said.values())) > 1:
        shown = " and ".join(f"{source} says {', '.join(orders[source])}" for source in said)
        problems["mesh.order"] = f"the order of axes: {shown}; say the same in both, or leave one out"
    return next(iter(said.values()), None)

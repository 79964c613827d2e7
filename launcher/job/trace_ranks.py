"""The ranks that trace their steps."""

from __future__ import annotations

from ...shared import variables
from ..errors import LaunchError
from ..inputs.rank_set import format_ranks
from ..options.trace import TraceOptions
from ..wording import count
from .plan import NodePlan

MAX_RANKS = 8  # ranks traced if the user names none: each gives some megabytes to transfer and to look at


def with_trace(
    nodes: tuple[NodePlan, ...], options: TraceOptions, *, is_first: bool = True
) -> tuple[NodePlan, ...]:
    """Return the nodes, where each rank to trace has the variable for that. `is_first`: this is the first
    attempt; a later one may have fewer ranks.

    Errors: LaunchError if a given rank is not in the job
    """
    if not options.is_on:
        return nodes
    world_size = sum(len(node.ranks) for node in nodes)
    chosen = set(_chosen(nodes, options, world_size=world_size, is_first=is_first))
    variable = (variables.TRACE, options.steps)
    return tuple(
        node._replace(
            ranks=tuple(
                one._replace(env=(*one.env, variable)) if one.rank in chosen else one for one in node.ranks
            )
        )
        for node in nodes
    )


def traced_ranks(node: NodePlan) -> tuple[int, ...]:
    """Ranks of one host that trace their steps."""
    return tuple(one.rank for one in node.ranks if any(name == variables.TRACE for name, _ in one.env))


def _chosen(
    nodes: tuple[NodePlan, ...], options: TraceOptions, *, world_size: int, is_first: bool
) -> list[int]:
    if options.ranks is None:
        return [node.ranks[0].rank for node in nodes][:MAX_RANKS]
    if is_first:
        for one in options.ranks:
            if one.stop > world_size and one != range(10**7):
                raise LaunchError(
                    f"--trace_ranks: there is no rank {one.stop - 1}; the job has "
                    f"{count(world_size, 'rank')}: {format_ranks(range(world_size))}"
                )
    return [rank for rank in range(world_size) if any(rank in one for one in options.ranks)]

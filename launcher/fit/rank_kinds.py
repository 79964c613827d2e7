"""The kinds of rank of a job: ranks that hold and compute the same, as far as the launcher knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..job.plan import NodePlan, Plan, RankPlan
from .answer import Answer, Rehearsed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKind:
    """One rank that is rehearsed, and the ranks that it stands for."""

    node: NodePlan
    rank: RankPlan
    place: str  # along --mesh; empty where all ranks are alike
    alike: tuple[int, ...]  # this rank among them

    def with_answer(self, answer: Answer) -> Rehearsed:
        """Return the kind without its node, with what was found."""
        return Rehearsed(rank=self.rank.rank, place=self.place, alike=self.alike, answer=answer)


def kinds_of(plan: Plan) -> tuple[RankKind, ...]:
    """Return rank 0's kind and one for each other pipeline stage and tensor place, in the order of ranks.

    A mesh that the program makes by itself is not known here: all ranks are then of rank 0's kind.
    """
    alike: dict[tuple[int, int], list[tuple[NodePlan, RankPlan]]] = {}
    for node, rank in _ranks(plan):
        alike.setdefault(_place(plan, rank.rank), []).append((node, rank))
    return tuple(
        RankKind(
            node=found[0][0],
            rank=found[0][1],
            place=_place_text(plan, stage, part),
            alike=tuple(rank.rank for _, rank in found),
        )
        for (stage, part), found in alike.items()
    )


def _ranks(plan: Plan) -> Iterator[tuple[NodePlan, RankPlan]]:
    for node in plan.nodes:
        for rank in node.ranks:
            yield node, rank


def _place(plan: Plan, rank: int) -> tuple[int, int]:
    """Return the rank's pipeline stage and its place along tp."""
    if plan.mesh is None:
        return 0, 0
    found = plan.mesh.axes.coordinates(rank)
    return found["pp"], found["tp"]


def _place_text(plan: Plan, stage: int, part: int) -> str:
    mesh = plan.mesh
    if mesh is None:
        return ""
    words = [f"stage {stage} of {mesh.pp}"] if mesh.pp > 1 else []
    return ", ".join([*words, *([f"tp {part}"] if mesh.tp > 1 else [])])

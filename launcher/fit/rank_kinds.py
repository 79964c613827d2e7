"""The kinds of rank of a job: ranks that hold and compute the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..job.mesh import JobMesh
from ..job.plan import NodePlan, Plan, RankPlan
from .answer import Answer, Rehearsed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKind:
    """One rank that is rehearsed, and the ranks that it stands for."""

    node: NodePlan
    rank: RankPlan
    place: str  # along the mesh; empty where all ranks are alike
    alike: tuple[int, ...]  # this rank among them
    pipeline: int = 0  # the first rank of its pipeline: stages of one pipeline send each other messages

    def with_answer(self, answer: Answer) -> Rehearsed:
        """Return the kind without its node, with what was found."""
        return Rehearsed(rank=self.rank.rank, place=self.place, alike=self.alike, answer=answer)


def kinds_of(plan: Plan, mesh: JobMesh | None = None) -> tuple[RankKind, ...]:
    """Return rank 0's kind and one for each other pipeline stage and tensor place, in the order of ranks.

    `mesh` is the one that the program was found to make; None: that of --mesh.
    """
    mesh = plan.mesh if mesh is None else mesh
    alike: dict[tuple[int, int], list[tuple[NodePlan, RankPlan]]] = {}
    for node, rank in _ranks(plan):
        alike.setdefault(_place(mesh, rank.rank), []).append((node, rank))
    return tuple(
        RankKind(
            node=found[0][0],
            rank=found[0][1],
            place=_place_text(mesh, stage, part),
            alike=tuple(rank.rank for _, rank in found),
            pipeline=alike[0, part][0][1].rank,
        )
        for (stage, part), found in alike.items()
    )


def are_other_kinds(some: Sequence[RankKind], others: Sequence[RankKind]) -> bool:
    """Tell whether the ranks of a job are divided into kinds in two different ways."""
    return [one.alike for one in some] != [one.alike for one in others]


def _ranks(plan: Plan) -> Iterator[tuple[NodePlan, RankPlan]]:
    for node in plan.nodes:
        for rank in node.ranks:
            yield node, rank


def _place(mesh: JobMesh | None, rank: int) -> tuple[int, int]:
    """Return the rank's pipeline stage and its place along tp."""
    if mesh is None:
        return 0, 0
    found = mesh.axes.coordinates(rank)
    return found["pp"], found["tp"]


def _place_text(mesh: JobMesh | None, stage: int, part: int) -> str:
    if mesh is None:
        return ""
    words = [f"stage {stage} of {mesh.pp}"] if mesh.pp > 1 else []
    return ", ".join([*words, *([f"tp {part}"] if mesh.tp > 1 else [])])

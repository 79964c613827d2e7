"""Pipelines on the fake CUDA device, whose streams and memory are watched: as one process trains."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import dslaunch
from dslaunch.runtime.comm.mesh import make_axis
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.engine import stages_engine
from dslaunch.runtime.pipeline.neighbours import Neighbour
from dslaunch.runtime.pipeline.schedule import Shape
from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.pipeline.models import Judge, data, loss_fn, specs, take_values, train_alone
from tests.runtime.pipeline.test_train import SIZE, STEPS, Trained, check, config_of, pairs
from tests.runtime.ranks import RankFailed, Ranks

pytestmark = pytest.mark.slow


def _train(rank: int, schedule: str, stage: int, is_tied: bool, num_ranks: int, num_micro: int) -> Trained:
    module = PipelineModule(
        specs(is_tied=is_tied), num_ranks, loss_fn=loss_fn, partition_method="uniform", schedule=schedule
    )
    take_values(module, Judge(is_tied=is_tied))
    engine: Any
    engine, *_ = dslaunch.initialize(model=module, config=config_of(stage, num_micro))
    losses, norms = [], []
    for step in range(STEPS):
        batch = [one.cuda() for one in data(step, size=SIZE * num_micro * engine.dp_world_size)]
        losses.append(engine.train_batch(pairs(*batch, engine, num_micro)).item())
        norms.append(engine.get_global_grad_norm())
    values = {name: safe_get_full_fp32_param(param).cpu() for name, param in module.named_parameters()}
    engine.destroy()
    return losses, norms, values


@pytest.mark.parametrize(
    ("schedule", "stage", "is_tied", "num_ranks", "num_micro"),
    [("zero_bubble", 0, True, 3, 6), ("zbv", 1, False, 4, 8)],
)
def test_stages_train_as_one_process(
    cuda_ranks: Ranks, schedule: str, stage: int, is_tied: bool, num_ranks: int, num_micro: int
) -> None:
    """Large messages end when both sides' streams have come to them, as on NCCL. Two ranks of a pipeline:
    the table of ways to train, training/test_parity.py.
    """
    batches = [data(step, size=SIZE * num_micro) for step in range(STEPS)]
    wanted = train_alone(Judge(is_tied=is_tied), batches)
    check(cuda_ranks(_train, schedule, stage, is_tied, num_ranks, num_micro, world_size=num_ranks), wanted)


class _Towards(NamedTuple):
    """As an axis of two, in a group of all ranks of the pipeline."""

    group: Any
    index: int

    def without_group(self) -> None:
        """It is not this one's."""


def _groups_of_a_direction(lines: Any, shape: Shape, place: int) -> dict[int, Neighbour]:
    """One group for all that goes to later ranks, and one for all that goes to earlier ones."""
    upward, downward = make_axis(lines), make_axis(lines)
    found = {}
    for other in range(shape.num_ranks):
        to, of = (upward, downward) if place < other else (downward, upward)
        found[other] = Neighbour(*(_Towards(axis.group, 1 - other) for axis in (to, of)))  # type: ignore[arg-type]
    return found


def _train_with_groups_of_a_direction(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages_engine, "make_neighbours", _groups_of_a_direction)
        _train(rank, "zero_bubble", 0, True, 3, 6)


def test_with_a_group_for_each_direction_ranks_wait_without_end(cuda_ranks: Ranks) -> None:
    """So that it is the order of messages that the others find; for which schedules: test_streams.py."""
    with pytest.raises(RankFailed, match="ranks wait for each other's messages without end"):
        cuda_ranks(_train_with_groups_of_a_direction, world_size=3)

"""Several kinds of parallelism at once: losses, norms and every parameter are those of one process."""

from __future__ import annotations

import pytest
import torch

from tests.exhaustive import few
from tests.runtime.ranks import Ranks
from tests.runtime.training.axes import Layout, Trained, make_engine, train, train_alone, values_of


def _train(rank: int, layout: Layout) -> Trained:
    engine = make_engine(layout)
    losses, norms = train(engine, layout)
    values = values_of(engine)
    engine.destroy()
    return losses, norms, values


def _check(ranks: Ranks, layout: Layout) -> None:
    losses, norms, expected = train_alone(layout)
    seen = set()
    for own_losses, own_norms, values in ranks(_train, layout, world_size=layout.axes.world_size):
        assert own_losses == pytest.approx(losses, abs=2e-6)
        assert own_norms == pytest.approx(norms, rel=2e-6)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], atol=2e-6, rtol=1e-5, msg=name)
        seen |= set(values)
    assert seen == set(expected)


SEQUENCES_AND_EXPERTS = [
    *(Layout(dp=2, sp=2, ep=ep, stage=stage) for ep in (2, 4) for stage in (0, 1, 2, 3)),
    *(Layout(sp=4, ep=ep, stage=stage) for ep in (2, 4) for stage in (1, 3)),
    *(Layout(dp=2, sp=2, ep=2, stage=stage, gradient="sum") for stage in (0, 3)),
]


@pytest.mark.parametrize(
    "layout",
    few(SEQUENCES_AND_EXPERTS, lambda one: one in (SEQUENCES_AND_EXPERTS[3], SEQUENCES_AND_EXPERTS[-2])),
    ids=str,
)
def test_sequences_and_experts_over_ranks(ranks: Ranks, layout: Layout) -> None:
    _check(ranks, layout)


EXPERTS_IN_STAGES = [
    *(
        Layout(pp=2, dp=2, ep=2, stage=stage, schedule=schedule)
        for schedule in ("1f1b", "zbv", "interleaved", "zero_bubble")
        for stage in (0, 1, 2, 3)
    ),
]


@pytest.mark.parametrize("layout", few(EXPERTS_IN_STAGES, lambda one: one == EXPERTS_IN_STAGES[3]), ids=str)
def test_experts_in_stages(ranks: Ranks, layout: Layout) -> None:
    _check(ranks, layout)


SEQUENCES_IN_STAGES = [
    *(Layout(pp=2, sp=2, stage=stage) for stage in (0, 1, 2, 3)),
    Layout(pp=2, sp=2, stage=3, schedule="zbv"),
    Layout(pp=2, sp=2, stage=0, gradient="sum"),
    *(Layout(pp=2, dp=2, sp=2, stage=stage) for stage in (1, 3)),
    Layout(pp=2, sp=2, ep=2, stage=3),
    Layout(pp=2, dp=2, sp=2, ep=4, stage=1),
]


@pytest.mark.parametrize("layout", few(SEQUENCES_IN_STAGES, lambda one: one == SEQUENCES_IN_STAGES[1]), ids=str)
def test_sequences_in_stages(ranks: Ranks, layout: Layout) -> None:
    _check(ranks, layout)


EXPERTS_AND_LAYERS = [
    *(Layout(dp=2, tp=2, ep=2, stage=stage) for stage in (0, 1, 2, 3)),
    Layout(sp=2, tp=2, ep=2, stage=3),
    Layout(pp=2, dp=2, tp=2, ep=2, stage=1),
    Layout(pp=2, sp=2, tp=2, ep=2, stage=3),
]


@pytest.mark.parametrize("layout", few(EXPERTS_AND_LAYERS, lambda one: one == EXPERTS_AND_LAYERS[2]), ids=str)
def test_experts_beside_layers_over_ranks(ranks: Ranks, layout: Layout) -> None:
    """Each rank along tp computes with the same experts what the others do."""
    _check(ranks, layout)


GROUPS = [
    *(Layout(dp=2, sp=2, stage=3, zero={key: 2}) for key in ("zero_hpz_partition_size", "mics_shard_size")),
    *(Layout(dp=2, tp=2, stage=3, zero={key: 2}) for key in ("zero_hpz_partition_size", "mics_shard_size")),
    *(
        Layout(dp=2, sp=2, tp=2, stage=3, zero={key: 2})
        for key in ("zero_hpz_partition_size", "mics_shard_size")
    ),
    Layout(dp=4, tp=2, stage=3, zero={"zero_hpz_partition_size": 2}),
    Layout(dp=4, tp=2, stage=3, zero={"mics_shard_size": 2}),
]


@pytest.mark.parametrize("layout", few(GROUPS, lambda one: one in GROUPS[:1]), ids=str)
def test_shards_inside_of_groups(ranks: Ranks, layout: Layout) -> None:
    _check(ranks, layout)

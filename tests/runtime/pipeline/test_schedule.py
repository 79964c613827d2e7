"""Tables of actions: complete, in order, and as costly as the formulas say."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.pipeline.schedule import (
    NAMES,
    Action,
    Kind,
    Table,
    chunks_of,
    forward_table,
    make_table,
    shape_of,
    simulate,
)
from tests.runtime.pipeline.test_train import config_of
from tests.runtime.ranks import Ranks


def _table(name: str, num_ranks: int, rounds: int) -> tuple[Table, int, int]:
    """Return it, the number of stages and that of micro batches."""
    shape = shape_of(name, num_ranks=num_ranks, per_rank=None)
    num_micro = 2 * num_ranks * rounds
    return make_table(shape, num_micro), shape.num_stages, num_micro


@pytest.mark.slow
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 3))
def test_each_micro_batch_passes_each_stage_once_there_and_back(
    name: str, num_ranks: int, rounds: int
) -> None:
    table, num_stages, num_micro = _table(name, num_ranks, rounds)
    shape = shape_of(name, num_ranks=num_ranks, per_rank=None)
    simulate(table, num_stages)  # comes to an end, so nothing waits for what comes later
    wanted = {(stage, number) for stage in range(num_stages) for number in range(num_micro)}
    by_kind: dict[Kind, list[tuple[int, int]]] = {kind: [] for kind in Kind}
    for rank, actions in enumerate(table):
        for kind, stage, number in actions:
            by_kind[kind].append((stage, number))
            assert stage in chunks_of(shape, rank)
    halves = by_kind[Kind.INPUTS]
    assert sorted(by_kind[Kind.FORWARD]) == sorted(wanted)
    assert sorted([*by_kind[Kind.BACKWARD], *halves]) == sorted(wanted)
    assert sorted(by_kind[Kind.WEIGHTS]) == sorted(halves)
    assert sorted(one for row in forward_table(shape, num_micro) for one in row) == sorted(
        Action(Kind.FORWARD, *one) for one in wanted
    )


@pytest.mark.parametrize(("num_ranks", "num_micro"), [(2, 4), (4, 8), (4, 16)])
def test_the_bubbles_are_those_of_the_formulas(num_ranks: int, num_micro: int) -> None:
    p, m = num_ranks, num_micro
    formulas = {
        "1f1b": (p - 1) / (m + p - 1),
        "gpipe": (p - 1) / (m + p - 1),
        "interleaved": (p - 1) / (2 * m + p - 1),
        "zero_bubble": (p - 1) / (6 * m + p - 1),
        "zbv": (p - 1) / (6 * m + p - 1),
        "dualpipev": (p - 1) / (6 * m + p - 1),
    }
    for name, bubble in formulas.items():
        shape = shape_of(name, num_ranks=p, per_rank=None)
        cost = simulate(make_table(shape, m), shape.num_stages)
        assert cost.bubble == pytest.approx(bubble), name
    shape = shape_of("1f1b", num_ranks=p, per_rank=None)
    assert simulate(make_table(shape, m), p).held == tuple(min(m, p - rank) for rank in range(p))


def test_what_a_schedule_cannot_have_is_named() -> None:
    with pytest.raises(ConfigError, match="'2f2b' is not known; there are 1f1b, gpipe, interleaved"):
        shape_of("2f2b", num_ranks=2, per_rank=None)
    with pytest.raises(ConfigError, match="stages_per_rank 3 with the schedule zbv: it has 2 on each rank"):
        shape_of("zbv", num_ranks=2, per_rank=3)
    with pytest.raises(ConfigError, match="7 micro batches on 2 ranks do not make 3 rounds of equal length"):
        make_table(shape_of("interleaved", num_ranks=2, per_rank=None), 7)
    with pytest.raises(ConfigError, match="dualpipev: 3 micro batches are fewer than the 4 stages"):
        make_table(shape_of("dualpipev", num_ranks=2, per_rank=None), 3)


# ---- as they run


class _Kept(torch.autograd.Function):
    """Keeps its input until its backward."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = x.clone()
        ctx.save_for_backward(kept)
        _Kept.alive.add(_Mark(ctx))
        _Kept.most = max(_Kept.most, len(_Kept.alive))
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class _Mark:
    """As long-lived as a node of the graph."""

    def __init__(self, ctx: Any) -> None:
        ctx.mark = self


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = _Kept.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return kept


def _run(rank: int, schedule: str, num_micro: int) -> tuple[int, dict[str, int], list[str]]:
    _Kept.alive, _Kept.most = weakref.WeakSet(), 0
    world_size = torch.distributed.get_world_size()
    shape = shape_of(schedule, num_ranks=world_size, per_rank=None)
    module = PipelineModule(
        [Keeps() for _ in range(shape.num_stages)],
        world_size,
        loss_fn=lambda out, y: out.square().sum(),
        partition_method="uniform",
        schedule=schedule,
    )
    engine, *_ = dslaunch.initialize(model=module, config=config_of(0, num_micro))
    micro = [(torch.ones(3, 4), torch.zeros(1)) for _ in range(num_micro)]
    engine.train_batch(iter(micro))
    _Kept.most = 0
    before = engine._wire.meter.bytes_by_kind()["send"]
    engine.train_batch(iter(micro))
    sent = engine._wire.meter.bytes_by_kind()["send"] - before
    labels = [str(one) for one in engine._wire.recorder.recent() if one.op == "receive"]
    most = _Kept.most
    engine.destroy()
    return most, {"send": sent}, labels


@pytest.mark.parametrize("schedule", NAMES)
def test_a_rank_holds_and_sends_what_the_formulas_say(ranks: Ranks, schedule: str) -> None:
    p, m = 3, 6
    shape = shape_of(schedule, num_ranks=p, per_rank=None)
    held = simulate(make_table(shape, m), shape.num_stages).held
    piece = 3 * 4 * 4  # bytes of a micro batch between two stages
    found = ranks(_run, schedule, m, world_size=p)
    assert tuple(most for most, *_ in found) == held
    for rank, (_, sent, labels) in enumerate(found):
        stages = chunks_of(shape, rank)
        forwards = sum(1 for s in stages if s + 1 < shape.num_stages and shape.owner(s + 1) != rank)
        backwards = sum(1 for s in stages if s > 0 and shape.owner(s - 1) != rank)
        assert sent["send"] == (forwards + backwards) * m * piece
        assert any("stage" in label and "micro batch 5" in label for label in labels)

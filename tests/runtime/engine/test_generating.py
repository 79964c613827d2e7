"""engine.generating(): ranks that generate as much as each likes, and train on as if they had not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import dslaunch
from dslaunch.runtime.comm.rank_group import RankGroup
from dslaunch.runtime.errors import ConfigError
from tests.runtime.models import Writer, make_config
from tests.runtime.ranks import Ranks


def _engine(stage: int, **changes: Any) -> dslaunch.Engine:
    return dslaunch.initialize(
        model=Writer(dropout=0.5), config=make_config(stage=stage, reduce_bucket_size=50, **changes)
    )[0]


def _step(engine: dslaunch.Engine, rank: int) -> None:
    torch.manual_seed(rank)
    tokens = torch.randint(11, (6, 5))
    engine.backward(nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
    engine.step()


def _generates(rank: int, stage: int, weights: str | None) -> None:
    one, other = _engine(stage), _engine(stage)
    for _ in range(2):
        _step(one, rank)
        _step(other, rank)
        whole = Writer().eval()
        with dslaunch.zero.GatheredParameters(other.parameters()):
            whole.load_state_dict({name: value.clone() for name, value in other.module.state_dict().items()})
        prompt = torch.tensor([[rank + 1, 2, 3]])
        num = 1 + 4 * (2 - rank)
        with one.generating(weights=weights) as how:
            assert how.weights == (weights or "whole")
            made = one.generate(prompt, num)  # inside another block
        assert torch.equal(made, whole.generate(prompt, num))
        assert made.grad_fn is None
        assert torch.equal(one.generate(prompt, num + 1), whole.generate(prompt, num + 1))
        with pytest.raises(KeyError) if rank == 1 else one.generating(weights=weights):  # noqa: SIM117
            with one.generating(weights=weights):
                one.module.generate(prompt, 2 + rank)
                if rank == 1:
                    raise KeyError("a reward that fails on one rank")
        assert one.module.training
        assert one.module.dropout.training
    _step(one, rank)
    _step(other, rank)
    with dslaunch.zero.GatheredParameters([*one.parameters(), *other.parameters()]):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize(("stage", "weights"), [(1, None), (3, None), (3, "units")])
def test_ranks_generate_as_much_as_each_likes(ranks: Ranks, stage: int, weights: str | None) -> None:
    ranks(_generates, stage, weights, world_size=3)


def _goes_apart(rank: int) -> None:
    engine, whole = _engine(3), Writer().eval()
    tokens = torch.tensor([[1, 2, 3]])
    of_rank = random.Random(rank)
    with engine.generating(weights="units"):
        for _ in range(12 + rank):
            order = [of_rank.randrange(3) for _ in range(of_rank.randrange(6))] * 2
            for _ in range(2):  # the second time the next one is gathered early
                assert torch.equal(engine.module(tokens, order), whole(tokens, order))
    _step(engine, rank)


def test_ranks_may_run_other_forwards(ranks: Ranks) -> None:
    ranks(_goes_apart, world_size=3)


def _asks_once_for_each_forward(rank: int) -> None:
    engine, whole = _engine(3), Writer().eval()
    tokens = torch.tensor([[1, 2, 3]])
    asked: list[str] = []
    plain = RankGroup.all_gather_numbers

    def counted(self: RankGroup, numbers: Any, *, device: Any, what: str) -> Any:
        asked.append(what)
        return plain(self, numbers, device=device, what=what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankGroup, "all_gather_numbers", counted)
        with engine.generating(weights="units"):
            engine.module(tokens)
            asked.clear()
            engine.module(tokens)
            engine.module(tokens)
            assert asked == 2 * ["which unit is gathered next"]
            for order in ((0,), (0, 1, 2, 1), (2,)) if rank else ((0, 1, 2),) * 3:
                assert torch.equal(engine.module(tokens, order), whole(tokens, order))
    _step(engine, rank)


def test_ranks_that_go_one_way_ask_each_other_once_for_each_forward(ranks: Ranks) -> None:
    ranks(_asks_once_for_each_forward, world_size=2)


def _with_two_models(rank: int) -> None:
    one, other, whole = _engine(3), _engine(3), Writer().eval()
    tokens = torch.tensor([[1, 2, 3]])
    with one.generating(weights="units"), other.generating(weights="units"):
        for engine, num in ((one, 2 + 2 * rank), (other, 5 - 2 * rank), (one, 2)):
            assert torch.equal(engine.generate(tokens, num), whole.generate(tokens, num))
    with one.generating(weights="units"):
        with pytest.raises(ConfigError, match=r"a pass over weights .* inside engine.generating"):
            next(iter(one.weights()))
        with torch.enable_grad(), pytest.raises(ConfigError, match=r"engine.backward\(\) inside"):
            one.backward(one.module(tokens).sum())
    with (
        pytest.raises(ConfigError, match=r"of one model is gathered inside .* of another one"),
        one.generating(weights="units"),
    ):
        other.module(tokens)
    _step(one, rank)
    _step(other, rank)


def test_two_models_generate_in_one_block(ranks: Ranks) -> None:
    ranks(_with_two_models, world_size=2)


def _is_refused(rank: int) -> None:
    engine = _engine(3)
    with pytest.raises(ConfigError, match="weights='all'"), engine.generating(weights="all"):
        raise AssertionError
    plain = dslaunch.initialize(model=nn.Linear(2, 2), config=make_config(stage=3))[0]
    assert not hasattr(plain, "generate")
    with pytest.raises(AttributeError, match="neither the engine nor its module"):
        plain.generate(1)
    with engine.generating(weights="whole"):  # at its end the old values would be written over these
        for load in (engine.load_weights, engine.load_checkpoint):
            with pytest.raises(ConfigError, match=r"a load while the parameters .* leave .*generating"):
                load("none")


def test_what_is_not_there_is_refused(ranks: Ranks) -> None:
    ranks(_is_refused, world_size=2)

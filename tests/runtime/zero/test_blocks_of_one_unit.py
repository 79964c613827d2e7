"""GatheredParameters around one parameter after another, as trainers send weights to a server: a unit is
gathered once for all of its parameters, and what is read is never out of date.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dslaunch
from dslaunch import ConfigError
from dslaunch.zero import GatheredParameters
from tests.runtime.models import batch, loss_of, make_config, make_model, snapshot
from tests.runtime.ranks import Ranks


def _sent(engine: Any) -> int:
    return int(engine._wire.meter.bytes_by_kind().get("parameters", 0))


def _read(engine: Any) -> dict[str, torch.Tensor]:
    """Each parameter in a block of its own; the loop has the last one's values when the next block begins."""
    found = {}
    for name, param in engine.module.named_parameters():
        with GatheredParameters([param]):
            data = param.data
            found[name] = data.clone()
    return found


def _step(engine: Any, step: int) -> None:
    engine.backward(loss_of(engine, batch(step).chunk(engine.world_size)[engine.global_rank]))
    engine.step()


def _looped(rank: int, drops: bool) -> None:
    config = make_config(stage=3)
    engine, *_ = dslaunch.initialize(model=make_model(), config=config)
    engine._model.loses_writes = drops
    whole = sum(one.layout.numel * 4 for unit in engine._model.units for one in unit.sub_buffers)
    for step in range(3):
        expected = snapshot(engine.module.named_parameters())
        before = _sent(engine)
        found = _read(engine)
        assert _sent(engine) - before <= whole / 2, "a unit was gathered more than once"
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        _step(engine, step)
    param = engine.module.get_parameter("last.bias")
    _change(engine, param)
    _fail(rank, engine, param, drops=drops)


def _change(engine: Any, param: nn.Parameter) -> None:
    """What is kept is gone after a change, by whatever way."""
    _read(engine)
    with GatheredParameters([param], modifier_rank=0):
        param.data.fill_(2.0)
    assert bool((_read(engine)["last.bias"] == 2.0).all())
    dslaunch.zero.safe_set_full_fp32_param(param, torch.full((1,), 3.0))
    assert bool((_read(engine)["last.bias"] == 3.0).all())
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in _read(engine).items()})
    assert not any(bool(value.any()) for value in _read(engine).values())
    with pytest.raises(ConfigError, match=r"last\.bias"):
        param.sum()


def _fail(rank: int, engine: Any, param: nn.Parameter, *, drops: bool) -> None:
    """A rank that writes, or whose block fails, has the others gather again with it."""
    if drops:
        with GatheredParameters([param]):
            if rank == 1:
                param.data.fill_(7.0)
        with GatheredParameters([param]):
            assert not param.any()
    _read(engine)
    try:
        with GatheredParameters([param]):
            if rank == 1 and drops:
                raise ValueError("one rank")
    except ValueError:
        pass
    with GatheredParameters([param]):
        assert not param.any()
    _step(engine, 0)
    dslaunch.zero.safe_get_full_fp32_param(param)


@pytest.mark.parametrize("drops", [False, True])
def test_a_loop_over_parameters_gathers_each_unit_once(ranks: Ranks, drops: bool) -> None:
    ranks(_looped, drops, world_size=2)

"""A graph whose parameters were replaced since its forward has no gradients, at every stage, as in one
process with torch's optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dslaunch
from tests.runtime.models import assert_same_bits, batch, loss_of, make_config, make_model, snapshot
from tests.runtime.ranks import Ranks

STAGES = (0, 1, 2, 3)
SAYS = (
    r"modified by an inplace operation|engine\.step\(\), a load or "
    r"GatheredParameters\(modifier_rank=\.\.\.\) has changed it"
)


def make_engine(stage: int) -> dslaunch.Engine:
    return dslaunch.initialize(model=make_model(), config=make_config(stage=stage))[0]


def loss_at(engine: dslaunch.Engine, step: int) -> Tensor:
    return loss_of(engine, batch(step).chunk(engine.world_size)[engine.global_rank])


def train(engine: dslaunch.Engine, steps: range) -> None:
    for step in steps:
        engine.backward(loss_at(engine, step))
        engine.step()


def _step(engine: dslaunch.Engine, folder: str) -> None:
    train(engine, range(1))


def _load_weights(engine: dslaunch.Engine, folder: str) -> None:
    engine.load_state_dict({name: value * 2 for name, value in engine.state_dict().items()})


def _load_checkpoint(engine: dslaunch.Engine, folder: str) -> None:
    engine.load_checkpoint(folder)


def _write(engine: dslaunch.Engine, folder: str) -> None:
    params = list(engine.module.parameters())
    with dslaunch.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
        for param in params:
            param.mul_(2)


def _backward_after(
    rank: int, change: Callable[[dslaunch.Engine, str], None], stage: int, folder: str
) -> None:
    engine = make_engine(stage)
    engine.save_checkpoint(folder)
    loss = loss_at(engine, 7)
    change(engine, folder)
    with pytest.raises(RuntimeError, match=SAYS):
        engine.backward(loss)
    engine.zero_grad()
    train(engine, range(1, 2))  # the engine can still be used
    engine.destroy()


@pytest.mark.parametrize("change", [_step, _load_weights, _load_checkpoint, _write])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_after_its_parameters_were_replaced_is_an_error(
    ranks: Ranks, change: Callable[[dslaunch.Engine, str], None], stage: int, tmp_path: Path
) -> None:
    ranks(_backward_after, change, stage, str(tmp_path), world_size=2)


def _write_to_what_is_not_saved(rank: int, stage: int) -> None:
    engine = make_engine(stage)
    last = engine.module.last
    assert isinstance(last, torch.nn.Linear)
    loss = loss_at(engine, 7)
    with dslaunch.zero.GatheredParameters([last.bias], modifier_rank=0), torch.no_grad():
        last.bias.add_(1)
    engine.backward(loss)


@pytest.mark.parametrize("stage", STAGES)
def test_a_bias_may_be_written_between_forward_and_backward(ranks: Ranks, stage: int) -> None:
    ranks(_write_to_what_is_not_saved, stage, world_size=2)


def _checkpointed(rank: int, stage: int) -> dict[str, Tensor]:
    """What a checkpoint computes again has the parameters of then, in one process, too."""
    engine = make_engine(stage)
    blocks = engine.module.blocks
    assert isinstance(blocks, torch.nn.ModuleList)
    x = torch.ones(3, 15)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    loss = x.pow(2).mean()
    train(engine, range(1))
    engine.backward(loss)
    engine.step()
    return snapshot(engine.module_state_dict())


def test_what_is_computed_again_is_in_date(ranks: Ranks) -> None:
    results = [ranks(_checkpointed, stage, world_size=2)[0] for stage in STAGES]
    for result in results[1:]:
        assert_same_bits(result, results[0])


def _step_without_a_part(rank: int, stage: int) -> dict[str, Tensor]:
    """A block that does not require a gradient in the step is left alone by it, so what has saved that
    block only is in date.
    """
    engine = make_engine(stage)
    blocks = engine.module.blocks
    assert isinstance(blocks, torch.nn.ModuleList)
    loss = blocks[0](torch.ones(3, 15)).pow(2).mean()
    blocks[0].requires_grad_(False)
    train(engine, range(1))
    blocks[0].requires_grad_(True)
    engine.backward(loss)
    engine.step()
    train(engine, range(1, 3))
    return snapshot(engine.module_state_dict())


def test_a_graph_of_parameters_that_the_step_left_alone_is_in_date(ranks: Ranks) -> None:
    results = [ranks(_step_without_a_part, stage, world_size=2)[0] for stage in STAGES]
    for result in results[1:]:
        assert_same_bits(result, results[0])

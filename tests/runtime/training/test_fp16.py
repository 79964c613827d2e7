"""Training in float16: the loss is scaled, the gradients are unscaled by the same number,
and bad steps change nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.errors import ConfigError, LossScaleError
from tests.runtime.models import (
    assert_same_bits,
    batch,
    loss_of,
    make_config,
    make_model,
    snapshot,
    train_engine,
    worst_difference,
)
from tests.runtime.ranks import Ranks

STAGES = (0, 1, 2, 3)
STEPS = 10
# Between 0.5 and 1, above which no weight here comes, neighbouring float16 numbers are 2^-11 apart.
FP16_DRIFT = 2.0**-11


def _config(stage: int, *, fp16: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return make_config(
        stage=stage, fp16={"enabled": True, "initial_scale_power": 8, **(fp16 or {})}, **changes
    )


def _train(rank: int, stage: int) -> tuple[dict[str, Tensor], float | None, list[torch.dtype]]:
    model = make_model()
    sgd = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    engine, optimizer, *_ = dslaunch.initialize(model=model, config=_config(stage, optimizer=sgd))
    assert engine.fp16_enabled()
    assert optimizer is not None
    assert optimizer.loss_scale == optimizer.cur_scale == 256.0
    train_engine(engine, steps=STEPS, dtype=torch.float16)
    params = snapshot(model.named_parameters())
    return params, engine.get_global_grad_norm(), [param.dtype for param in params.values()]


def _by_hand() -> tuple[dict[str, Tensor], float]:
    """Weights and gradients in float16, masters and states in float32, with plain PyTorch."""
    masters, model = make_model(), make_model().half()
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.05, momentum=0.9)
    norm = 0.0
    for step in range(STEPS):
        model.zero_grad()
        (loss_of(model, batch(step).half()) * 256.0).backward()
        for master, param in zip(masters.parameters(), model.parameters(), strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() / 256.0
        norm = float(
            torch.nn.utils.get_total_norm([one.grad for one in masters.parameters() if one.grad is not None])
        )
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters.parameters(), model.parameters(), strict=True):
                param.copy_(master)
    return snapshot(model.named_parameters()), norm


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_stage_trains_as_one_process_does_by_hand(ranks: Ranks, world_size: int) -> None:
    expected, norm = _by_hand()
    found = [ranks(_train, stage, world_size=world_size)[0] for stage in STAGES]
    for params, own_norm, dtypes in found:
        assert worst_difference(params, expected) <= FP16_DRIFT
        assert own_norm == pytest.approx(norm, rel=2e-2)  # float16 gradients, rounded once more over ranks
        assert set(dtypes) == {torch.float16}
        assert_same_bits(params, found[0][0])


class Slope(nn.Module):
    """The gradient of its weight is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(300))

    def forward(self) -> Tensor:
        return self.weight.float().sum()


def _grow(rank: int, stage: int) -> tuple[list[float], list[float], list[float | None]]:
    """The weight, the scale and the norm after each step of SGD with lr 1."""
    model = make_model(Slope)
    fp16 = {"loss_scale_window": 3}
    config = _config(stage, fp16=fp16, optimizer={"type": "SGD", "params": {"lr": 1.0}})
    engine, optimizer, *_ = dslaunch.initialize(model=model, config=config)
    assert optimizer is not None
    weights, scales, norms = [], [], []
    for _ in range(7):
        engine.backward(engine())
        engine.step()
        weights.append(snapshot(model.named_parameters())["weight"].float().mean().item())
        scales.append(optimizer.loss_scale)
        norms.append(engine.get_global_grad_norm())
    return weights, scales, norms


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_the_step_that_doubles_the_scale_is_a_whole_one(ranks: Ranks, stage: int, world_size: int) -> None:
    for weights, scales, norms in ranks(_grow, stage, world_size=world_size):
        assert weights == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]
        assert scales == [256.0, 256.0, 256.0, 512.0, 512.0, 512.0, 1024.0]
        assert norms == pytest.approx([300**0.5] * 7)


def _poison(rank: int, stage: int, value: float) -> tuple[int, float, list[float], bool]:
    """One rank's loss is not finite in the second of three steps."""
    model = make_model()
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}}
    config = _config(stage, fp16={"hysteresis": 1}, scheduler=scheduler)
    engine, optimizer, *_ = dslaunch.initialize(model=model, config=config)
    assert optimizer is not None
    train_engine(engine, steps=1, dtype=torch.float16)
    before, lr = snapshot(model.named_parameters()), engine.get_lr()
    states = [{name: state.clone() for name, state in part.items()} for part in optimizer.states]
    own = batch(1).chunk(engine.world_size)[rank].half()
    engine.backward(loss_of(engine, own) * (value if rank == engine.world_size - 1 else 1.0))
    engine.step()
    assert not engine.was_step_applied()
    assert_same_bits(before, snapshot(model.named_parameters()))
    is_same = all(
        torch.equal(state, now[name])
        for part, now in zip(states, optimizer.states, strict=True)
        for name, state in part.items()
    )
    skipped, scale, same_lr = engine.skipped_steps, optimizer.loss_scale, engine.get_lr() == lr
    train_engine(engine, steps=1, first=2, dtype=torch.float16)
    assert engine.was_step_applied()
    return skipped, scale, engine.get_lr(), is_same and same_lr


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_not_finite_halves_the_scale_and_changes_nothing_else(
    ranks: Ranks, stage: int, value: float
) -> None:
    for skipped, scale, _, is_same in ranks(_poison, stage, value, world_size=2):
        assert (skipped, scale, is_same) == (1, 128.0, True)


def _hopeless(rank: int) -> str:
    model = make_model()
    engine, *_ = dslaunch.initialize(
        model=model, config=_config(1, fp16={"initial_scale_power": 0, "hysteresis": 1})
    )
    engine.backward(loss_of(engine, batch(0).half()) * float("inf"))
    with pytest.raises(LossScaleError) as caught:
        engine.step()
    assert engine.skipped_steps == engine.global_steps == 1
    return str(caught.value)


def test_when_no_scale_is_small_enough_that_is_said(ranks: Ranks) -> None:
    for message in ranks(_hopeless, world_size=2):
        assert message.startswith("Current loss scale already at minimum (1)")
        assert "train in bf16" in message


def _accumulated(rank: int, by_hand: bool) -> dict[str, Tensor]:
    """backward(scale_wrt_gas=False) of a part, and scale() for a backward of one's own: both are scaled."""
    model = make_model(Slope)
    config = _config(
        2,
        train_batch_size=2 * torch.distributed.get_world_size(),
        gradient_accumulation_steps=2,
        optimizer={"type": "SGD", "params": {"lr": 1.0}},
    )
    engine, *_ = dslaunch.initialize(model=model, config=config)
    for _ in range(2):
        if by_hand:
            engine.scale(engine()).backward()
        else:
            engine.backward(engine() / 2, scale_wrt_gas=False)
        engine.step()
    return snapshot(model.named_parameters())


@pytest.mark.parametrize("by_hand", [False, True])
def test_every_way_to_run_a_backward_scales_the_loss(ranks: Ranks, by_hand: bool) -> None:
    for params in ranks(_accumulated, by_hand, world_size=2):
        assert torch.equal(params["weight"], torch.full((300,), -1.0, dtype=torch.float16))


def _unscaled(rank: int, stage: int) -> tuple[str, dict[str, Tensor]]:
    """A backward without the loss scale, and a step after it that is right."""
    model = make_model(Slope)
    config = _config(stage, optimizer={"type": "SGD", "params": {"lr": 1.0}})
    engine, *_ = dslaunch.initialize(model=model, config=config)
    with pytest.raises(ConfigError) as refused:
        engine().backward()
    engine.zero_grad()
    engine.scale(engine()).backward()
    engine.step()
    return str(refused.value), snapshot(model.named_parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_without_the_loss_scale_is_refused(ranks: Ranks, stage: int) -> None:
    for message, params in ranks(_unscaled, stage, world_size=2):
        assert message.endswith("call engine.backward(loss), or engine.scale(loss).backward()")
        assert torch.equal(params["weight"], torch.full((300,), -1.0, dtype=torch.float16))


def _resumed(rank: int, folder: str) -> list[float]:
    """A checkpoint keeps the scale."""
    scales = []
    for loads in (False, True):
        engine, optimizer, *_ = dslaunch.initialize(
            model=make_model(), config=_config(3, fp16={"loss_scale_window": 3})
        )
        assert optimizer is not None
        if loads:
            engine.load_checkpoint(folder)
        else:
            train_engine(engine, steps=6, dtype=torch.float16)
            engine.save_checkpoint(folder)
        scales.append(optimizer.loss_scale)
        train_engine(engine, steps=1, dtype=torch.float16)
        scales.append(optimizer.loss_scale)
    return scales


def test_a_checkpoint_keeps_the_scale(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_resumed, str(tmp_path), world_size=2)[0] == [512.0, 1024.0, 512.0, 1024.0]


def _auto_cast(rank: int) -> torch.dtype:
    engine, *_ = dslaunch.initialize(model=make_model(), config=_config(0, fp16={"auto_cast": True}))
    result: Tensor = engine(batch(0))
    return result.dtype


def test_auto_cast_makes_inputs_float16(ranks: Ranks) -> None:
    assert ranks(_auto_cast, world_size=1) == [torch.float16]

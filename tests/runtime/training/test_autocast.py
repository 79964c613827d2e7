"""torch_autocast: float32 parameters, gradients and averages, and a forward in 16 bits, as plain
torch.autocast computes it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from tests.runtime.models import (
    batch,
    loss_of,
    make_config,
    make_model,
    snapshot,
    worst_difference,
)
from tests.runtime.ranks import Ranks

STAGES = (0, 1, 2, 3)
STEPS = 4
SHRINK = 1e-3  # of the loss: 2^16 times a gradient of 1 is more than float16 holds
LR = 0.05 / SHRINK
SGD = {"type": "SGD", "params": {"lr": LR}}
# One rank computes what plain torch does in the same process. What two add up differs in the last bit, and
# then what is rounded to 16 bits may go the other way. Seen: 2e-4 and 4e-5.
DRIFT = {("bfloat16", 1): 1e-6, ("float16", 1): 1e-6, ("bfloat16", 2): 2.0**-11, ("float16", 2): 2.0**-14}


def _config(dtype: str, stage: int, **changes: Any) -> dict[str, Any]:
    return make_config(
        stage=stage, torch_autocast={"enabled": True, "dtype": dtype}, optimizer=SGD, **changes
    )


def _by_hand(dtype: torch.dtype) -> dict[str, Tensor]:
    """Plain torch: the forward under autocast, the loss outside, and 2^16 as the scale of a float16 loss."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scale = 2.0**16 if dtype is torch.float16 else 1.0
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            out = model(batch(step))
        (out.float().pow(2).mean() * SHRINK * scale).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= scale
        optimizer.step()
    return snapshot(model.named_parameters())


def _train(rank: int, dtype: str) -> list[float]:
    expected, found = _by_hand(getattr(torch, dtype)), []
    for stage in STAGES:
        model = make_model()
        engine, *_ = dslaunch.initialize(model=model, config=_config(dtype, stage))
        with torch.no_grad():
            assert engine(batch(0)).dtype is engine.torch_autocast_dtype() is getattr(torch, dtype)
        for step in range(STEPS):
            engine.backward(loss_of(engine, batch(step).chunk(engine.world_size)[rank]) * SHRINK)
            engine.step()
        assert engine.skipped_steps == 0
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        assert all(not part.optimizer_shard.has_separate_master for part in engine._model.trained)
        assert not engine.fp16_enabled()
        assert not engine.bfloat16_enabled()
        assert engine.dynamic_loss_scale() == (dtype == "float16")
        found.append(worst_difference(snapshot(model.named_parameters()), expected))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_stage_trains_as_plain_autocast_does(ranks: Ranks, dtype: str, world_size: int) -> None:
    for differences in ranks(_train, dtype, world_size=world_size):
        assert max(differences) <= DRIFT[dtype, world_size]


def _scales(rank: int) -> list[tuple[float, bool]]:
    """A loss that is too large for float16 in the second step."""
    engine, optimizer, *_ = dslaunch.initialize(model=make_model(), config=_config("float16", 2))
    assert optimizer is not None
    seen = []
    for factor in (SHRINK, 1e6, SHRINK):
        before = snapshot(engine.named_parameters())
        engine.backward(loss_of(engine, batch(0)) * factor)
        engine.step()
        is_same = worst_difference(before, snapshot(engine.named_parameters())) == 0.0
        assert is_same == (not engine.was_step_applied())
        seen.append((optimizer.loss_scale, engine.was_step_applied()))
    return seen


def test_the_first_overflow_skips_the_step_and_halves_the_scale(ranks: Ranks) -> None:
    for seen in ranks(_scales, world_size=2):
        assert seen == [(65536.0, True), (32768.0, False), (32768.0, True)]


def _off(rank: int) -> tuple[torch.dtype, torch.dtype | None, float]:
    engine, optimizer, *_ = dslaunch.initialize(
        model=make_model(), config=make_config(torch_autocast={"enabled": False, "dtype": "fp16"})
    )
    assert optimizer is not None
    out: Tensor = engine(batch(0))
    return out.dtype, engine.torch_autocast_dtype(), optimizer.loss_scale


def test_switched_off_it_does_nothing(ranks: Ranks) -> None:
    assert ranks(_off, world_size=1) == [(torch.float32, None, 1.0)]

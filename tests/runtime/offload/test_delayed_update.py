"""The update beside the next forward and backward, against the plain loop that defines it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch import zero
from tests.runtime.models import (
    batch,
    make_model,
    snapshot,
    train_engine,
    worst_difference,
)
from tests.runtime.offload.homes import Where, make_engine
from tests.runtime.ranks import Ranks

STATES_AWAY = Where("cpu", "none", is_apart=True)
ALL_AWAY = Where("cpu", "cpu", is_apart=True)
STEPS, WARMUP = 7, 2
CLIP, LR, WEIGHT_DECAY, MOMENTUM = 1.5, 0.01, 0.1, 0.9
OPTIMIZERS: dict[str, Any] = {
    "AdamW": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
    "SGD": {"type": "SGD", "params": {"lr": LR, "momentum": MOMENTUM}},
}
# Float32 against float64. SGD adds up errors of gradients, times lr and 1 / (1 - momentum). AdamW divides a gradient by its own size,
# so that an error of 2^-24 in one that nearly cancels out becomes one of up to lr: as FP32_DRIFT of test_stages. Seen: 5e-8, 6e-7
DRIFT = {"SGD": 1e-6, "AdamW": 1e-5}
MATTERS = 1e-3  # what the delay changes is more than this


def _delayed(warmup: int = WARMUP) -> dict[str, Any]:
    return {"delayed_update": {"enabled": True, "warmup_steps": warmup}}


def _engine(stage: int, where: Where, *, when: dict[str, Any] | None = None, **changes: Any) -> Any:
    changes = {"gradient_clipping": CLIP, "optimizer": OPTIMIZERS["AdamW"], **changes}
    precision = changes.pop("precision", "fp32")
    return make_engine(stage, precision, where, "", when=_delayed() if when is None else when, **changes)


def _everything(engine: Any) -> dict[str, Tensor]:
    found = dict(snapshot(engine.state_dict()))
    for name, param in engine.module.named_parameters():
        for key in ("master", *engine.optimizer.parts[0].states):
            value = (
                zero.safe_get_full_fp32_param(param)
                if key == "master"
                else zero.safe_get_full_optimizer_state(param, key)
            )
            assert value is not None
            found[f"{name} {key}"] = value
    return found


# ---- the definition


def _reference(kind: str, *, delay: bool, drained_after: int = 0) -> tuple[dict[str, Tensor], list[float]]:
    """The plain loop, in float64; return parameters with all steps in them, and the gradient norms."""
    model = make_model().double()
    params = list(model.parameters())
    masters = [param.detach().clone() for param in params]
    first, second = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    norms = []
    for step in range(1, STEPS + 1):
        model.zero_grad()
        loss = sum((model(part.double()).pow(2).mean() for part in batch(step - 1).chunk(1)), torch.zeros(()))
        loss.backward()
        grads = [param.grad for param in params if param.grad is not None]
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        norms.append(norm)
        grads = [grad * min(1.0, CLIP / (norm + 1e-6)) for grad in grads]
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)  # the step before; not this one
            for master, grad, one, two in zip(masters, grads, first, second, strict=True):
                if kind == "SGD":
                    one.mul_(MOMENTUM).add_(grad)
                    master.sub_(one, alpha=LR)
                else:
                    one.lerp_(grad, 1 - 0.9)
                    two.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
                    master.mul_(1 - LR * WEIGHT_DECAY)
                    divisor = (two / (1 - 0.999**step)).sqrt() + 1e-8
                    master.sub_(LR * (one / (1 - 0.9**step)) / divisor)
            if not delay or step <= WARMUP or step == drained_after:
                for param, master in zip(params, masters, strict=True):
                    param.copy_(master)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, masters, strict=True)), norms


def _train(rank: int, stage: int, where: Where, kind: str, drained_after: int) -> Any:
    engine = _engine(stage, where, optimizer=OPTIMIZERS[kind])
    norms = []
    for step in range(STEPS):
        train_engine(engine, steps=1, first=step)
        assert bool(engine._schedule._under_way) == (step + 1 > WARMUP)
        norms.append(engine.get_global_grad_norm())
        if step + 1 == drained_after:
            snapshot(engine.module.named_parameters())
            assert not engine._schedule._under_way
    engine.destroy()
    return snapshot(engine.module.named_parameters()), norms


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize(
    ("stage", "where", "world_size"),
    [(2, STATES_AWAY, 2), (3, STATES_AWAY, 1), (3, ALL_AWAY, 2)],
)
@pytest.mark.parametrize("drained_after", [0, 4])
def test_it_trains_as_the_plain_loop_does(
    ranks: Ranks, stage: int, where: Where, world_size: int, kind: str, drained_after: int
) -> None:
    expected, expected_norms = _reference(kind, delay=True, drained_after=drained_after)
    for params, norms in ranks(_train, stage, where, kind, drained_after, world_size=world_size):
        assert worst_difference(params, expected) <= DRIFT[kind]
        assert norms == pytest.approx(expected_norms, rel=1e-4)
    at_once, _ = _reference(kind, delay=False)
    other, _ = _reference(kind, delay=True, drained_after=0 if drained_after else 4)
    assert worst_difference(at_once, expected) > MATTERS
    assert worst_difference(other, expected) > 10 * DRIFT[kind]

"""The update beside the next forward and backward, against the plain loop that defines it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dslaunch import ConfigError, zero
from dslaunch.runtime.step.delayed_steps import DelayedSteps
from dslaunch.runtime.zero.model.parked_states import KINDS
from tests.exhaustive import few
from tests.runtime.models import (
    assert_same_bits,
    batch,
    loss_of,
    make_model,
    snapshot,
    train_engine,
    worst_difference,
)
from tests.runtime.offload.residences import Where, make_engine
from tests.runtime.ranks import Ranks

STATES_AWAY = Where("cpu", "none", is_apart=True)
ALL_AWAY = Where("cpu", "cpu", is_apart=True)
STEPS, WARMUP = 7, 2
CLIP, LR, WEIGHT_DECAY, MOMENTUM = 1.5, 0.01, 0.1, 0.9
OPTIMIZERS: dict[str, Any] = {
    "AdamW": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
    "SGD": {"type": "SGD", "params": {"lr": LR, "momentum": MOMENTUM}},
}
# Float32 against float64. SGD adds up errors of gradients, times lr and 1 / (1 - momentum). AdamW divides a
# gradient by its own size, so that an error of 2^-24 in one that nearly cancels out becomes one of up to lr:
# as FP32_DRIFT of test_stages. Seen: 2.4e-7 of both
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
        for key in ("master", *engine.optimizer.sub_buffers[0].optimizer_shard.states):
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
        loss = model(batch(step - 1).double()).pow(2).mean()
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


def _train(
    rank: int, stage: int, where: Where, kind: str, drained_after: int, zero_keys: dict[str, Any]
) -> Any:
    zero_optimization = {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 600,
        **zero_keys,
    }
    engine = _engine(stage, where, optimizer=OPTIMIZERS[kind], zero_optimization=zero_optimization)
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
@pytest.mark.parametrize(
    ("stage", "where", "world_size", "kind", "drained_after"),
    few(
        [
            (*row, kind, drained_after)
            for row in ((2, STATES_AWAY, 2), (3, STATES_AWAY, 1), (3, ALL_AWAY, 2))
            for kind in ("AdamW", "SGD")
            for drained_after in (0, 4)
        ],
        lambda stage, where, world_size, kind, drained_after: (
            (where is ALL_AWAY and kind == "AdamW") or (stage, kind, drained_after) == (2, "SGD", 4)
        ),
    ),
)
def test_it_trains_as_the_plain_loop_does(
    ranks: Ranks, stage: int, where: Where, world_size: int, kind: str, drained_after: int
) -> None:
    expected, expected_norms = _reference(kind, delay=True, drained_after=drained_after)
    for params, norms in ranks(_train, stage, where, kind, drained_after, {}, world_size=world_size):
        assert worst_difference(params, expected) <= DRIFT[kind]
        assert norms == pytest.approx(expected_norms, rel=1e-4)
    at_once, _ = _reference(kind, delay=False)
    other, _ = _reference(kind, delay=True, drained_after=0 if drained_after else 4)
    assert worst_difference(at_once, expected) > MATTERS
    assert worst_difference(other, expected) > 10 * DRIFT[kind]


HYBRID = [(2, {"mics_shard_size": 2}), (3, {"zero_hpz_partition_size": 2})]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "keys"), HYBRID)
def test_groups_that_share_in_two_ways_train_as_the_plain_loop_does(
    ranks: Ranks, stage: int, keys: dict[str, Any]
) -> None:
    expected, _ = _reference("SGD", delay=True, drained_after=4)
    for params, _ in ranks(_train, stage, STATES_AWAY, "SGD", 4, keys, world_size=4):
        assert worst_difference(params, expected) <= DRIFT["SGD"]


# ---- the same kernel: a run without it, which is shown old parameters


def _shown_old(engine: Any, steps: int, dtype: torch.dtype) -> None:
    """Train; one rank, at a stage where each has all parameters and their masters lie elsewhere."""
    engine._model._copied = ()  # what is shown is not to be taken over
    params = list(engine.module.parameters())
    latest = visible = [param.detach().clone() for param in params]
    for step in range(steps):
        with torch.no_grad():
            for param, value in zip(params, visible, strict=True):
                param.copy_(value)
        train_engine(engine, steps=1, first=step, dtype=dtype)
        before = latest
        if engine.was_step_applied():
            latest = [param.detach().clone() for param in params]
        is_delayed = engine.was_step_applied() and engine.optimizer.num_steps > WARMUP
        visible = before if is_delayed else latest
    with torch.no_grad():
        for param, value in zip(params, latest, strict=True):
            param.copy_(value)


SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.02}}
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16": (torch.bfloat16, {"precision": "bf16"}),
    "micro batches": (torch.bfloat16, {"precision": "bf16", "gradient_accumulation_steps": 3}),
    "learning rate": (torch.float32, {"scheduler": SCHEDULE}),
    "overflow": (
        torch.float16,
        {
            "precision": "fp16",
            "fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1},
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_has_the_bits_of_a_run_that_is_shown_old_parameters(case: str) -> None:
    dtype, changes = CASES[case]
    steps = 12
    delayed, at_once = (_engine(2, STATES_AWAY, when=when, **changes) for when in (_delayed(), {}))
    train_engine(delayed, steps=steps, dtype=dtype)
    _shown_old(at_once, steps, dtype)
    assert_same_bits(_everything(delayed), _everything(at_once))
    assert delayed.skipped_steps == at_once.skipped_steps
    assert (delayed.skipped_steps > 0) == (case == "overflow")
    assert delayed.optimizer.num_steps > WARMUP + 2
    for engine in (delayed, at_once):
        engine.destroy()


def test_gradients_of_a_step_outlive_the_next_backward() -> None:
    engines = [_engine(2, STATES_AWAY, when=_delayed(0), precision="bf16") for _ in range(2)]
    may_go_on = threading.Event()
    update_of = engines[0]._schedule._update_of

    def late(update: Any) -> Callable[[Any], None]:
        update_sub_buffer = update_of(update)

        def wait(ready: Any) -> None:
            assert may_go_on.wait(timeout=60)
            update_sub_buffer(ready)

        return wait

    engines[0]._schedule._update_of = late
    for step in range(4):
        for engine in engines:
            engine.backward(loss_of(engine, batch(step).bfloat16()))
        may_go_on.set()
        for engine in engines:
            engine._schedule.finish()
        may_go_on.clear()
        for engine in engines:
            engine.step()
    may_go_on.set()
    assert_same_bits(*map(_everything, engines))
    for engine in engines:
        engine.destroy()


# ---- who needs all of it


def _weight(engine: Any) -> Any:
    return engine.module.first.weight


def _write_gathered(engine: Any, folder: str) -> None:
    with zero.GatheredParameters([_weight(engine)], modifier_rank=0):
        _weight(engine).data.fill_(0.5)


def _load(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder)
    train_engine(engine, steps=1, first=9)
    assert engine._schedule._under_way
    engine.load_checkpoint(folder)


def _reload(engine: Any, folder: str) -> None:
    engine.offload_states(KINDS)
    engine.reload_states()


DRAINS: dict[str, Callable[[Any, str], object]] = {
    "state_dict": lambda engine, folder: engine.state_dict(),
    "checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "load": _load,
    "16 bit model": lambda engine, folder: engine.save_16bit_model(folder),
    "master": lambda engine, folder: zero.safe_get_full_fp32_param(_weight(engine)),
    "own master": lambda engine, folder: zero.safe_get_local_fp32_param(_weight(engine)),
    "state": lambda engine, folder: zero.safe_get_full_optimizer_state(_weight(engine), "exp_avg"),
    "states": lambda engine, folder: engine.optimizer.states,
    "set master": lambda engine, folder: zero.safe_set_full_fp32_param(
        _weight(engine), torch.full((15, 7), 0.5)
    ),
    "set state": lambda engine, folder: zero.safe_set_full_optimizer_state(
        _weight(engine), torch.full((15, 7), 0.5), "exp_avg_sq"
    ),
    "gathered": _write_gathered,
    "moved away and back": _reload,
}


def _drains(rank: int, stage: int, where: Where, folder: str) -> None:
    for name, action in DRAINS.items():
        states = []
        for is_drained in (True, False):
            engine = _engine(stage, where, when=_delayed(1))
            train_engine(engine, steps=3)
            assert engine._schedule._under_way
            with torch.no_grad():
                engine(batch(3))  # may be stale
            assert engine._schedule._under_way
            if is_drained:
                engine._schedule.drain()
            action(engine, f"{folder}/{name}")
            assert not engine._schedule._under_way, name
            found = _everything(engine)
            train_engine(engine, steps=2, first=3)
            states.append(
                {**found, **{f"{key} at the end": value for key, value in _everything(engine).items()}}
            )
            engine.destroy()
        assert_same_bits(*states)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "where"), few([(2, STATES_AWAY), (3, ALL_AWAY)], lambda stage, _: stage == 2)
)
def test_who_looks_from_outside_gets_all_steps_so_far(
    ranks: Ranks, tmp_path: Path, stage: int, where: Where
) -> None:
    ranks(_drains, stage, where, str(tmp_path), world_size=2)


def _resume(rank: int, stage: int, folder: str) -> None:
    beside = {"checkpoint": {"async_save": stage == 3}}  # the files are written while training goes on
    first, second = (_engine(stage, STATES_AWAY, precision="bf16", **beside) for _ in range(2))
    train_engine(first, steps=4, dtype=torch.bfloat16)
    first.save_checkpoint(folder)
    train_engine(first, steps=3, first=4, dtype=torch.bfloat16)
    first._saver.wait()
    second.load_checkpoint(folder)
    train_engine(second, steps=3, first=4, dtype=torch.bfloat16)
    for engine in (first, second):
        assert engine._schedule._under_way, "steps of the warmup are counted on"
    assert_same_bits(_everything(first), _everything(second))
    for engine in (first, second):
        engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_holds_the_step_that_is_under_way(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    ranks(_resume, stage, str(tmp_path), world_size=2)


def test_what_was_gathered_before_a_drain_is_gathered_anew() -> None:
    engine = _engine(3, ALL_AWAY, when=_delayed(0))
    train_engine(engine, steps=3)
    loss_of(engine, batch(3))  # its units stay here for a backward
    params = dict(engine.module.named_parameters())
    masters = {name: zero.safe_get_full_fp32_param(param) for name, param in params.items()}
    assert_same_bits(
        engine.state_dict(), {name: value for name, value in masters.items() if value is not None}
    )
    engine.destroy()


class Reading(nn.Module):
    """Its forward gathers, or writes, a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 15), nn.Linear(15, 1)
        self.modifier_rank: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        with zero.GatheredParameters([self.last.weight], modifier_rank=self.modifier_rank):
            if self.modifier_rank is not None:
                self.last.weight.data.mul_(2)
        result: Tensor = self.last(self.first(x))
        return result


@pytest.mark.parametrize("stage", [2, 3])
def test_in_a_forward_parameters_are_read_as_they_are_and_not_written(stage: int) -> None:
    engine = _engine(stage, ALL_AWAY if stage == 3 else STATES_AWAY, when=_delayed(0), kind=Reading)
    train_engine(engine, steps=2)
    engine(batch(2))
    assert engine._schedule._under_way
    engine.module.modifier_rank = 0
    with pytest.raises(ConfigError, match="from outside while a forward or backward runs"):
        engine(batch(2))
    engine.module.modifier_rank = None
    engine.destroy()


def test_an_error_in_the_thread_is_told_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(2, STATES_AWAY, when=_delayed(0))
    train_engine(engine, steps=1)
    monkeypatch.setattr(engine.optimizer.rule, "check", lambda groups: None)  # which finds it before the step
    eps = engine.optimizer.param_groups[0]["eps"]
    engine.optimizer.param_groups[0]["eps"] = -1.0
    train_engine(engine, steps=1, first=1)
    engine.optimizer.param_groups[0]["eps"] = eps
    engine.backward(loss_of(engine, batch(2)))
    with pytest.raises(ValueError, match="eps"):
        engine.step()
    engine.destroy()


PATH = "zero_optimization.offload_optimizer"


@pytest.mark.parametrize(
    ("stage", "where", "message"),
    [
        (
            1,
            STATES_AWAY,
            f"{PATH}.delayed_update.enabled true: at stage 1 every rank keeps whole gradients until the step",
        ),
        (2, Where("none", "none", is_apart=True), f'{PATH}.delayed_update.enabled true is for device "cpu"'),
        (
            2,
            Where("cpu", "none", is_apart=True, ratio=0.5),
            f"{PATH}.ratio 0.5 would delay a part of the step only",
        ),
        (3, Where("cpu", "nvme", is_apart=True), "delayed_update do not go together"),
    ],
)
def test_what_it_cannot_do_is_refused(stage: int, where: Where, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(stage, "fp32", where, "/tmp", when=_delayed())


def test_on_cpus_alone_it_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = _engine(2, Where("cpu", "none", is_apart=False))
    assert not isinstance(engine._schedule, DelayedSteps)
    assert f"{PATH}.delayed_update.enabled has no effect" in caplog.text
    engine.destroy()

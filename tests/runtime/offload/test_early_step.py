"""The step during backward (super_offload): the bits of a run without it, whatever happens between
backward and step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import ConfigError, zero
from dslaunch.runtime.step.early_steps import EarlySteps
from tests.exhaustive import few
from tests.runtime.models import assert_same_bits, batch, loss_of, make_config, snapshot, train_engine
from tests.runtime.offload.residences import DTYPES, Where, make_engine
from tests.runtime.ranks import Ranks

STATES_AWAY = Where("cpu", "none", is_apart=True)
ALL_AWAY = Where("cpu", "cpu", is_apart=True)
EARLY = {"super_offload": True}
STEPS = 4


def _state(engine: Any) -> dict[str, Tensor]:
    """Everything that a step changes."""
    found = dict(snapshot(engine.state_dict()))
    for name, param in engine.module.named_parameters():
        values = {"master": zero.safe_get_full_fp32_param(param)}
        for key in engine.optimizer.sub_buffers[0].optimizer_shard.states:
            values[key] = zero.safe_get_full_optimizer_state(param, key)
        found |= {f"{name} {key}": value for key, value in values.items() if value is not None}
    return found


def _guesses(engine: Any) -> tuple[int, int]:
    assert isinstance(engine._schedule, EarlySteps)
    return engine._schedule.num_right, engine._schedule.num_wrong


def _both(stage: int, precision: str, where: Where, train: Callable[[Any], None], **changes: Any) -> Any:
    """Train in both ways, compare, and return how many guesses were right and wrong."""
    states = []
    for when in ({}, EARLY):
        engine = make_engine(stage, precision, where, "", when=when, **changes)
        train(engine)
        states.append({**_state(engine), "norm": torch.tensor(engine.get_global_grad_norm())})
        guesses = _guesses(engine) if when else None
        engine.destroy()
    assert_same_bits(*states)
    return guesses


# ---- whole runs

OPTIMIZERS: dict[str, Any] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "SGD": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
}
RUNS: dict[str, tuple[dict[str, Any], Callable[[int, int], bool]]] = {
    "never clipped": ({"gradient_clipping": 0.0}, lambda right, wrong: right > 0 and wrong == 0),
    "always clipped": ({"gradient_clipping": 1e-3}, lambda right, wrong: right == 0 and wrong > 0),
    "sometimes": ({"gradient_clipping": 2.3}, lambda right, wrong: right > 0 and wrong > 0),
    "micro batches": (
        {"gradient_clipping": 0.0, "gradient_accumulation_steps": 3},
        lambda right, wrong: right > 0 and wrong == 0,
    ),
    "SGD": (
        {"gradient_clipping": 0.0, "optimizer": OPTIMIZERS["SGD"]},
        lambda right, wrong: right > 0 and wrong == 0,
    ),
}


def _runs(rank: int, stage: int, precision: str, where: Where) -> dict[str, tuple[int, int]]:
    dtype = DTYPES[precision]
    return {
        name: _both(
            stage, precision, where, lambda engine: _train(engine, dtype), reduce_bucket_size=100, **changes
        )
        for name, (changes, _) in RUNS.items()
    }


def _train(engine: Any, dtype: torch.dtype) -> None:
    train_engine(engine, steps=STEPS, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision", "where", "world_size"),
    [
        (2, "bf16", STATES_AWAY, 2),
        (2, "fp32", STATES_AWAY, 1),
        (3, "fp32", ALL_AWAY, 2),  # the master is the parameter
        (3, "fp16", STATES_AWAY, 1),
    ],
)
def test_a_run_has_the_same_bits(
    ranks: Ranks, stage: int, precision: str, where: Where, world_size: int
) -> None:
    for guesses in ranks(_runs, stage, precision, where, world_size=world_size):
        for name, (_, is_right) in RUNS.items():
            assert is_right(*guesses[name]), (name, guesses)


def _overflow(rank: int) -> tuple[int, int]:
    def train(engine: Any) -> None:
        train_engine(engine, steps=6, dtype=torch.float16)
        assert 0 < engine.skipped_steps < 6

    fp16 = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}
    guesses: tuple[int, int] = _both(2, "fp16", STATES_AWAY, train, fp16=fp16, gradient_clipping=0.0)
    return guesses


def _share(rank: int) -> tuple[int, int]:
    where = Where("cpu", "none", is_apart=True, ratio=0.5)
    guesses: tuple[int, int] = _both(
        2, "bf16", where, lambda engine: _train(engine, torch.bfloat16), gradient_clipping=0.0
    )
    return guesses


HYBRID = {2: {"mics_shard_size": 2}, 3: {"zero_hpz_partition_size": 2}}


def _hybrid(rank: int) -> list[tuple[int, int]]:
    return [
        _both(
            stage,
            "bf16",
            STATES_AWAY,
            lambda engine: _train(engine, torch.bfloat16),
            gradient_clipping=0.0,
            zero_optimization={
                "stage": stage,
                "stage3_param_persistence_threshold": 0,
                "reduce_bucket_size": 100,
                **keys,
            },
        )
        for stage, keys in HYBRID.items()
    ]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_groups_that_share_in_two_ways_have_the_same_bits(ranks: Ranks) -> None:
    for guesses in ranks(_hybrid, world_size=4):
        for right, wrong in guesses:
            assert right > 0
            assert wrong == 0


@pytest.mark.slow
def test_steps_that_overflow_are_skipped(ranks: Ranks) -> None:
    for right, wrong in ranks(_overflow, world_size=2):
        assert right > 0
        assert wrong > 0


@pytest.mark.slow
def test_what_stays_on_the_device_is_updated_in_the_step(ranks: Ranks) -> None:
    for right, wrong in ranks(_share, world_size=2):
        assert right > 0
        assert wrong == 0


# ---- what happens between backward and step


def _backward(engine: Any, seed: int = 7) -> None:
    own = batch(seed).chunk(engine.world_size)[engine.global_rank].bfloat16()
    engine.backward(loss_of(engine, own))


def _weight(engine: Any) -> Any:
    return engine.module.first.weight


def _write_gathered(engine: Any) -> None:
    with zero.GatheredParameters([_weight(engine)], modifier_rank=0):
        _weight(engine).data.fill_(0.5)


def _load_weights(engine: Any) -> None:
    engine.load_state_dict({name: value * 0.5 for name, value in engine.state_dict().items()})


def _reload(engine: Any) -> None:
    engine.offload_states()
    engine.reload_states()


def _checkpoint(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder)  # beside what follows
    _backward(engine, 8)  # what it leaves is dropped
    engine.load_checkpoint(folder)
    _backward(engine, 9)


def _read(engine: Any) -> None:
    _state(engine)
    zero.safe_get_full_grad(_weight(engine))


def _change_lr(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] = torch.tensor(0.3)


def _more_micro_batches(engine: Any) -> None:
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    engine.set_gradient_accumulation_boundary(None)
    _backward(engine, 8)


def _without_engine(engine: Any) -> None:
    own = batch(8).chunk(engine.world_size)[engine.global_rank].bfloat16()
    engine.scale(loss_of(engine, own)).backward()


def _coalesced(engine: Any) -> None:
    with engine.coalesce_grad_reduction():
        _backward(engine, 8)
        _backward(engine, 9)


ACTIONS: dict[str, Callable[[Any], None]] = {
    "nothing": lambda engine: None,
    "gradient": lambda engine: zero.safe_set_full_grad(_weight(engine), torch.full((15, 7), 0.25)),
    "no gradient": lambda engine: engine.zero_grad(),
    "master": lambda engine: zero.safe_set_full_fp32_param(_weight(engine), torch.full((15, 7), 0.5)),
    "state": lambda engine: zero.safe_set_full_optimizer_state(
        _weight(engine), torch.full((15, 7), 0.5), "exp_avg"
    ),
    "gathered": _write_gathered,
    "weights": _load_weights,
    "moved away and back": _reload,
    "lr": _change_lr,
    "betas": lambda engine: engine.optimizer.param_groups[0].update(betas=(0.5, 0.6)),
    "second backward": lambda engine: _backward(engine, 8),
    "more micro batches": _more_micro_batches,
    "backward without the engine": _without_engine,
    "coalesced": _coalesced,
    "reading": _read,
}
# Guesses of sub-buffers that no backward touched stay right; those of `first` are never, where it is touched.
ALL_RIGHT = {"nothing", "reading"}


def _actions(rank: int, stage: int, where: Where, folder: str) -> dict[str, tuple[int, int]]:
    def act(action: Callable[[Any], None]) -> Callable[[Any], None]:
        def train(engine: Any) -> None:
            train_engine(engine, steps=1, dtype=torch.bfloat16)
            _backward(engine)
            action(engine)
            engine.step()
            train_engine(engine, steps=1, first=2, dtype=torch.bfloat16)

        return train

    actions = {
        **ACTIONS,
        "checkpoint": lambda engine: _checkpoint(engine, f"{folder}/{engine._schedule.__class__.__name__}"),
    }
    return {
        name: _both(
            stage,
            "bf16",
            where,
            act(action),
            gradient_clipping=0.0,
            reduce_bucket_size=100,
            checkpoint={"async_save": True},
        )
        for name, action in actions.items()
    }


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "where"), few([(2, STATES_AWAY), (3, ALL_AWAY)], lambda stage, _: stage == 3)
)
def test_what_happens_between_backward_and_step_counts_the_same(
    ranks: Ranks, tmp_path: Path, stage: int, where: Where
) -> None:
    first, second = ranks(_actions, stage, where, str(tmp_path), world_size=2)
    for name in first:
        assert first[name][0] > 0 < second[name][0], name
        wrong = first[name][1] + second[name][1]  # a rank may hold nothing of what was touched
        assert (wrong == 0) == (name in ALL_RIGHT), name


# ---- one process


def test_the_update_is_made_before_the_step_and_seen_by_nobody() -> None:
    engine = make_engine(2, "bf16", STATES_AWAY, "", when=EARLY, gradient_clipping=0.0)
    before = _state(engine)
    _backward(engine)
    made = [
        (sub_buffer, host_update._future.result(timeout=60))
        for sub_buffer, (_, host_update) in engine._schedule._guesses.items()
    ]
    assert {sub_buffer for sub_buffer, _ in made} == set(engine.optimizer.sub_buffers)
    assert_same_bits(_state(engine), before)
    rooms = engine._schedule._rooms
    nbytes = sum(one.nbytes for room in rooms.values() for one in (room.master, *room.states.values()))
    assert nbytes == 12 * sum(sub_buffer.optimizer_shard.master.numel() for sub_buffer in rooms)
    expected = {sub_buffer: (ready.master.clone(), ready.param_out.clone()) for sub_buffer, ready in made}
    masters = {sub_buffer: sub_buffer.optimizer_shard.master for sub_buffer in engine.optimizer.sub_buffers}
    engine.step()
    for sub_buffer, (master, param) in expected.items():
        assert sub_buffer.optimizer_shard.master is masters[sub_buffer]
        assert torch.equal(sub_buffer.optimizer_shard.master, master)
        assert torch.equal(sub_buffer.param_shard.own, param)
    engine.destroy()


def test_an_error_in_the_thread_is_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(2, "bf16", STATES_AWAY, "", when=EARLY, gradient_clipping=0.0)
    before = _state(engine)
    monkeypatch.setattr(engine.optimizer.rule, "check", lambda groups: None)  # which finds it before the step
    engine.optimizer.param_groups[0]["eps"] = -1.0
    _backward(engine)
    with pytest.raises(ValueError, match="eps"):
        engine.step()
    assert _guesses(engine)[0] > 0, "the step did not make the update itself"
    engine.zero_grad()
    assert not any(
        sub_buffer.optimizer_shard.pending_update for sub_buffer in engine.optimizer.sub_buffers
    ), "nothing is left for the next step"
    assert_same_bits(_state(engine), before)
    engine.destroy()


PATH = "zero_optimization.offload_optimizer"


@pytest.mark.parametrize(
    ("stage", "when", "message"),
    [
        (
            1,
            {"device": "cpu", **EARLY},
            f"{PATH}.super_offload true: at stage 1 every rank keeps whole gradients until the step",
        ),
        (2, EARLY, f'{PATH}.super_offload true is for device "cpu", not "none"'),
        (
            2,
            {"device": "nvme", "nvme_path": "/tmp", **EARLY},
            f'{PATH}.super_offload true is for device "cpu", not "nvme"',
        ),
        (
            2,
            {"device": "cpu", **EARLY, "delayed_update": {"enabled": True}},
            f"{PATH}.super_offload true and delayed_update.enabled true are two times for the same step",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(stage: int, when: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(stage, "bf16", Where("none", "none", is_apart=True), "", when=when)


def test_an_optimizer_that_sees_whole_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="super_offload true: Lamb steps on the device"):
        make_engine(2, "bf16", STATES_AWAY, "", when=EARLY, optimizer={"type": "Lamb", "params": {}})


def test_on_cpus_alone_it_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(2, "bf16", Where("cpu", "none", is_apart=False), "", when=EARLY)
    assert not isinstance(engine._schedule, EarlySteps)
    assert f"{PATH}.super_offload has no effect" in caplog.text
    engine.destroy()


def test_parameters_on_a_disk_are_refused() -> None:
    config = make_config(stage=3)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", **EARLY}
    config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": "/tmp"}
    with pytest.raises(ConfigError, match="do not go together"):
        dslaunch.initialize(model=torch.nn.Linear(2, 2), config=config)

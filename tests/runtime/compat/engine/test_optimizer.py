"""The names that programs written for DeepSpeed read on what `initialize()` returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dslaunch
from dslaunch.runtime.errors import CheckpointError, ConfigError
from tests.runtime.models import make_config, make_model
from tests.runtime.ranks import Ranks


def _engine(stage: int, *, optimizer: Any = None, **changes: Any) -> dslaunch.Engine:
    model = make_model()
    made = None if optimizer is None else optimizer(model.parameters())
    config = make_config(stage=stage, reduce_bucket_size=50, **changes)
    if made is not None:
        del config["optimizer"]
    engine, *_ = dslaunch.initialize(model=model, optimizer=made, config=config)
    return engine


def _step(engine: dslaunch.Engine, seed: int) -> None:
    torch.manual_seed(seed)
    engine.backward(engine(torch.randn(6, 7)).square().mean())
    engine.step()


def _unwrap(rank: int, stage: int, is_clients: bool) -> None:
    engine = _engine(stage, optimizer=torch.optim.AdamW if is_clients else None)
    outer, depth = engine.optimizer, 0
    inner: Any = outer
    while hasattr(inner, "optimizer"):
        inner, depth = inner.optimizer, depth + 1
    assert depth == 1
    assert isinstance(inner, torch.optim.Optimizer)
    assert inner.param_groups is outer.param_groups
    assert outer.optimizer is inner
    before = {name: p.clone() for name, p in engine.module_state_dict().items()}
    for group in inner.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    _step(engine, rank)
    for name, value in engine.module_state_dict().items():
        assert torch.equal(value, before[name]), name
    if is_clients:
        assert type(inner) is torch.optim.AdamW
        return
    for call in (inner.step, inner.zero_grad, lambda: inner.add_param_group({"params": []})):
        with pytest.raises(ConfigError):
            call()
    with pytest.raises(CheckpointError):
        inner.load_state_dict({})
    with pytest.raises(CheckpointError):
        len(inner.state)


@pytest.mark.parametrize("is_clients", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_program_that_unwraps_the_optimizer_reaches_one_whose_lr_counts(
    ranks: Ranks, stage: int, is_clients: bool
) -> None:
    ranks(_unwrap, stage, is_clients, world_size=2)


def _scaled(rank: int) -> None:
    engine = _engine(
        2, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 3}
    )
    optimizer, scaler = engine.optimizer, engine.optimizer.loss_scaler
    assert (optimizer.loss_scale, optimizer.cur_scale, scaler.cur_scale, scaler.loss_scale) == (16.0,) * 4
    assert (scaler.dynamic, optimizer.dynamic_loss_scale, scaler.scale_factor) == (True, True, 2.0)
    assert (scaler.scale_window, scaler.min_scale, scaler.delayed_shift) == (3, 1.0, 1)
    assert (scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis) == (0, -1, 1)
    without_zero = optimizer.loss_scale_config
    assert (without_zero.cur_scale, without_zero.min_loss_scale, without_zero.scale_window) == (16.0, 1.0, 3)
    assert (without_zero.dynamic_loss_scale, without_zero.use_grad_scaling) == (True, True)
    scaler.cur_scale = 8
    assert (optimizer.loss_scale, engine.scale(torch.tensor(1.0, requires_grad=True)).item()) == (8.0, 8.0)
    optimizer.loss_scale = 4.0
    assert scaler.cur_scale == 4.0
    for wrong in (0, -1.0, float("inf"), float("nan"), "2", None):
        with pytest.raises(ConfigError, match="must be a number above 0"):
            scaler.cur_scale = wrong
    torch.manual_seed(rank)
    x = torch.randn(6, 7, dtype=torch.half)
    engine.backward(engine(x * (float("inf") if rank == 1 else 1.0)).float().square().mean())
    optimizer.check_overflow()
    assert optimizer.overflow
    engine.step()
    assert optimizer.overflow  # which accelerate asks after each step
    assert (scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_scale) == (1, 0, 2.0)
    engine.backward(engine(x).float().square().mean())
    engine.step()
    assert not optimizer.overflow


def test_the_loss_scaler_has_deepspeed_s_names_and_can_be_set(ranks: Ranks) -> None:
    ranks(_scaled, world_size=2)


def _overflow(rank: int, stage: int) -> None:
    engine, plain = (_engine(stage, gradient_accumulation_steps=2) for _ in range(2))
    for micro in range(4):
        torch.manual_seed(10 * micro + rank)
        x = torch.randn(3, 7)
        for one in (engine, plain):
            one.backward(one(x).square().mean())
        engine.optimizer.check_overflow()
        assert not engine.optimizer.overflow
        for one in (engine, plain):
            one.step()
    states = [one.module_state_dict() for one in (engine, plain)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    engine.backward(engine(torch.randn(3, 7) * (float("nan") if rank == 1 else 1.0)).mean())
    assert engine.optimizer.has_overflow()  # before the boundary, and on all ranks


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_check_overflow_tells_all_ranks_what_one_has_and_changes_no_step(ranks: Ranks, stage: int) -> None:
    ranks(_overflow, stage, world_size=2)


def _clipped(rank: int) -> None:
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    model = nn.Linear(7, 1)
    engine, *_ = dslaunch.initialize(
        model=model, config=make_config(stage=3, optimizer=sgd, gradient_clipping=5.0)
    )
    assert (engine.optimizer.clip_grad, engine.gradient_clipping()) == (5.0, 5.0)
    for limit in (0.01, None):
        engine.optimizer.clip_grad = limit
        assert engine.gradient_clipping() == (limit or 0.0)
        before = engine.module_state_dict()
        before = {name: value.clone() for name, value in before.items()}
        engine.backward(100 * engine(torch.ones(6, 7)).square().mean())
        engine.step()
        norm = engine.get_global_grad_norm()
        moved = torch.cat(
            [(value - before[name]).flatten() for name, value in engine.module_state_dict().items()]
        )
        torch.testing.assert_close(
            moved.norm().item(), norm if limit is None else limit, rtol=1e-3, atol=1e-5
        )


def test_clip_grad_set_by_the_program_counts_from_the_next_step(ranks: Ranks) -> None:
    ranks(_clipped, world_size=2)


def _groups(rank: int) -> None:
    engine = _engine(2)
    trained = [one for group in engine.optimizer.param_groups for one in group["params"]]
    for name in ("bit16_groups", "fp16_groups", "bf16_groups"):
        (group,) = getattr(engine.optimizer, name)
        assert [id(one) for one in group] == [id(one) for one in trained], name
    assert engine.optimizer.get_lr() == 0.01
    assert not hasattr(engine.optimizer, "nonsense")
    with pytest.raises(AttributeError, match=r"single_partition_of_fp32_groups.*safe_get_full_fp32_param"):
        engine.optimizer.single_partition_of_fp32_groups  # noqa: B018


def test_groups_are_the_parameters_and_flat_partitions_are_refused_by_name(ranks: Ranks) -> None:
    ranks(_groups, world_size=1)


def _config(rank: int) -> None:
    config = _engine(3, bf16={"enabled": True}, gradient_clipping=0.5)._config
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.world_size) == (12, 12, 1)
    assert (config.gradient_accumulation_steps, config.gradient_clipping) == (1, 0.5)
    assert (config.zero_enabled, config.zero_optimization_stage, config.zero_config.stage) == (True, 3, 3)
    assert (config.zero_config.reduce_bucket_size, config.zero_config.offload_param) == (50, None)
    assert (config.bfloat16_config.enabled, config.float16_config.enabled) == (True, False)
    assert (config.optimizer_name, config.optimizer_params["lr"]) == ("adamw", 0.01)
    assert (config.scheduler_name, config.scheduler_params) == (None, None)
    assert config._param_dict["zero_optimization"]["stage"] == 3
    assert config.zero_config.model_dump()["reduce_bucket_size"] == 50
    assert getattr(config, "autotuning_config", "none") == "none"
    with pytest.raises(
        AttributeError, match=r"engine._config.autotuning_config is not here; engine.settings"
    ):
        config.autotuning_config  # noqa: B018
    with pytest.raises(AttributeError, match="are fixed once initialize"):
        config.train_batch_size = 3
    with pytest.raises(AttributeError, match="are fixed once initialize"):
        config.zero_config.stage = 2


def test_the_settings_can_be_read_as_deepspeed_s_config(ranks: Ranks) -> None:
    ranks(_config, world_size=1)


def _moved(rank: int, stage: int) -> None:
    engine = _engine(stage)
    optimizer = engine.optimizer
    for moves in (False, True, False):
        torch.manual_seed(rank)
        engine.backward(engine(torch.randn(3, 7)).square().mean())
        engine.step()
        assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0
        if moves:
            optimizer.offload_states(include=["optim_states", "hp_params"], device="cpu", non_blocking=True)
            with pytest.raises(ConfigError, match=r"reload_states\(\)"):
                engine.step()
            optimizer.reload_states(non_blocking=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_states_are_moved_and_the_norm_is_read_by_the_optimizer_too(ranks: Ranks, stage: int) -> None:
    """Programs have the optimizer do it, and read its norm in their logs."""
    ranks(_moved, stage, world_size=2)

"""engine.offload_states(): memory that is really given up, the same tensors with the same bits
afterwards, refusals between.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import ConfigError
from dslaunch.runtime.zero.model.offload_kinds import OffloadDeviceEnum, OffloadStateTypeEnum
from tests.runtime.models import (
    ADAMW,
    assert_same_bits,
    batch,
    loss_of,
    make_config,
    make_model,
    snapshot,
    train_engine,
)
from tests.runtime.ranks import Ranks

ROOT = Path(__file__).parents[3]
STAGES = (0, 1, 2, 3)
LAMB = {"type": "Lamb", "params": {"lr": 0.01}}  # it sees whole parameters, each on one rank


def _engine(stage: int, **changes: Any) -> dslaunch.Engine:
    return dslaunch.initialize(model=make_model(), config=make_config(stage=stage, **changes))[0]


def _storages(engine: dslaunch.Engine) -> Iterator[tuple[str, Tensor]]:
    """What the engine holds between steps, gradients apart."""
    for unit in engine._model.units:
        for sub_buffer in unit.sub_buffers:
            yield "lp_params", sub_buffer.param_shard.own
            yield "hp_params", sub_buffer.optimizer_shard.master
            for state in sub_buffer.optimizer_shard.states.values():
                yield "optim_states", state
            for states in sub_buffer.optimizer_shard.states_of_whole.values():
                for value in states().values():
                    if isinstance(value, Tensor):
                        yield "optim_states", value


def _held_bytes(engine: dslaunch.Engine, *kinds: str) -> int:
    return sum(tensor.untyped_storage().nbytes() for kind, tensor in _storages(engine) if kind in kinds)


def _half_a_step(engine: dslaunch.Engine, step: int, half: int) -> None:
    micro = batch(step).chunk(2)[half]
    x = micro.chunk(engine.world_size)[engine.global_rank]
    engine.backward(loss_of(engine, x.bfloat16() if engine.bfloat16_enabled() else x))
    engine.step()


def _train(rank: int, stage: int, is_offloaded: bool, changes: dict[str, Any]) -> dict[str, Tensor]:
    """Three steps of two micro batches, with an excursion to host memory after each micro batch."""
    engine = _engine(stage, gradient_accumulation_steps=2, **changes)
    addresses = {id(param): name for name, param in engine.named_parameters()}
    for step in range(3):
        for half in range(2):
            _half_a_step(engine, step, half)
            if is_offloaded:
                engine.offload_states()
                assert _held_bytes(engine, "lp_params", "hp_params", "optim_states") == 0
                assert all(param.grad is None for param in engine.parameters())
                engine.reload_states(non_blocking=True)
    assert {id(param): name for name, param in engine.named_parameters()} == addresses
    return snapshot(engine.named_parameters())


def _trained_both_ways(rank: int, changes: dict[str, Any]) -> None:
    for stage in STAGES:
        assert_same_bits(_train(rank, stage, True, changes), _train(rank, stage, False, changes))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [{}, {"bf16": {"enabled": True}}, {"optimizer": LAMB}],
    ids=["fp32", "bf16", "whole parameters"],
)
def test_training_goes_on_with_the_same_bits(ranks: Ranks, changes: dict[str, Any], world_size: int) -> None:
    ranks(_trained_both_ways, changes, world_size=world_size)


def _kinds(rank: int, stage: int) -> list[tuple[int, ...]]:
    """Bytes of each kind with all of them here, and with one of them gone."""
    engine = _engine(stage, bf16={"enabled": True})
    train = {"steps": 1, "dtype": torch.bfloat16}
    train_engine(engine, **train)  # type: ignore[arg-type]
    kinds = ("optim_states", "hp_params", "lp_params")
    seen = [tuple(_held_bytes(engine, kind) for kind in kinds)]
    for kind in (OffloadStateTypeEnum.optim_states, "hp_params", OffloadStateTypeEnum.lp_params):
        engine.offload_states(include=[kind], device=OffloadDeviceEnum.cpu)
        seen.append(tuple(_held_bytes(engine, kind) for kind in kinds))
        engine.reload_states()
    train_engine(engine, **train)  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("stage", [1, 3])
def test_only_what_is_named_goes_by_text_or_enum(ranks: Ranks, stage: int) -> None:
    for whole, no_states, no_masters, no_params in ranks(_kinds, stage, world_size=2):
        assert min(whole) > 0
        assert no_states == (0, whole[1], whole[2])
        assert no_masters == (whole[0], 0, whole[2])
        assert no_params == (whole[0], whole[1], 0)


def _said(attempt: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        attempt()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _refusals(rank: int, stage: int, folder: str) -> dict[str, str]:
    engine = _engine(stage)
    train_engine(engine, steps=1)
    param = dict(engine.named_parameters())["first.weight"]
    x = batch(0, size=2)
    before = snapshot(engine.named_parameters())
    engine.offload_states()
    assert engine.optimizer is not None
    said = {
        "forward": _said(lambda: engine(x)),
        "module": _said(lambda: engine.module(x)),
        "step": _said(engine.step),
        "zero_grad": _said(engine.zero_grad),
        "optimizer": _said(engine.optimizer.zero_grad),
        "state_dict": _said(engine.state_dict),
        "load": _said(lambda: engine.load_state_dict({})),
        "save": _said(lambda: engine.save_checkpoint(folder)),
        "16bit": _said(lambda: engine.save_16bit_model(folder)),
        "value": _said(lambda: dslaunch.zero.safe_get_full_fp32_param(param)),
        "gathered": _said(lambda: snapshot({"p": param})),
        "touched": _said(lambda: param.sum()),
    }
    engine.reload_states()
    assert_same_bits(before, snapshot(engine.named_parameters()))
    train_engine(engine, steps=1)
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_whatever_needs_what_is_gone_is_refused_in_one_line(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    said = ranks(_refusals, stage, str(tmp_path), world_size=2)[0]
    assert said["step"] == (
        "engine.step() needs optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer, which "
        "engine.offload_states() has moved to host memory; call engine.reload_states() first"
    )
    assert said["touched"].startswith(
        "parameter 'first.weight' was asked for sum, but its values are in host memory"
    )
    assert all("engine.reload_states() first" in line for line in said.values())


def _without_states(rank: int, stage: int) -> dict[str, Tensor]:
    """Forward and backward with the optimizer's states away, as a loop that is short of memory does."""
    engine = _engine(stage)
    for step in range(2):
        engine.offload_states(include=["optim_states"])
        x = batch(step).chunk(engine.world_size)[rank]
        engine.backward(loss_of(engine, x))
        _said(engine.step)
        engine.reload_states()
        engine.step()
    return snapshot(engine.named_parameters())


def _with_states(rank: int, stage: int) -> dict[str, Tensor]:
    engine = _engine(stage)
    train_engine(engine, steps=2)
    return snapshot(engine.named_parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_a_micro_batch_runs_while_only_the_states_are_away(ranks: Ranks, stage: int) -> None:
    left, right = (ranks(run, stage, world_size=2)[0] for run in (_without_states, _with_states))
    assert_same_bits(left, right)


def _backward_past_the_engine(rank: int, stage: int, is_offloaded: bool) -> dict[str, Tensor] | str:
    """Two backwards that the user runs, the second one while the first one's gradients are away."""
    engine = _engine(stage)
    for number in range(2):
        loss = engine.scale(loss_of(engine, batch(number).chunk(engine.world_size)[rank]))
        if number and is_offloaded:
            engine.offload_states(include=["lp_grads"])
            if stage >= 2 and engine.world_size > 1:
                said = _said(loss.backward)  # type: ignore[arg-type]
                engine.reload_states()
                return said
        loss.backward()  # type: ignore[no-untyped-call]
    engine.reload_states()
    engine.step()
    return snapshot(engine.named_parameters())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_come_meanwhile_are_added_or_refused(
    ranks: Ranks, stage: int, world_size: int
) -> None:
    found = ranks(_backward_past_the_engine, stage, True, world_size=world_size)[0]
    if stage >= 2 and world_size > 1:
        assert "is in host memory, where engine.offload_states() has put it" in found
    else:
        assert_same_bits(found, ranks(_backward_past_the_engine, stage, False, world_size=world_size)[0])


def _misuse(rank: int) -> list[str]:
    engine = _engine(3)
    said = [
        _said(lambda: engine.offload_states(include=["optimizer"])),
        _said(lambda: engine.offload_states(include="optim_states")),
        _said(lambda: engine.offload_states(device="nvme")),
    ]
    with dslaunch.zero.GatheredParameters(engine.parameters()):
        said.append(_said(engine.offload_states))
    engine.reload_states()  # nothing is away: nothing happens
    engine.offload_states()
    engine.offload_states()
    engine.destroy()
    assert len(snapshot(engine.named_parameters())) == 18
    return said


def test_misuse_is_refused_by_name(ranks: Ranks) -> None:
    said = ranks(_misuse, world_size=2)[0]
    states = "optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer"
    assert said[0] == f"offload_states(include=['optimizer']): must be a list of states, which are {states}"
    assert said[1] == f"offload_states(include='optim_states'): must be a list of states, which are {states}"
    assert said[2].startswith("offload_states(device='nvme'): states can go to host memory only")
    assert said[3].startswith("offload_states() while the parameters of 'first to blocks.0.0' are gathered")


# A process of its own: the device and NCCL stay with a process for good.
ON_GPU = """
import torch, dslaunch
from torch import nn

model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
config = {{"train_micro_batch_size_per_gpu": 1, "optimizer": {optimizer!r}, "bf16": {{"enabled": True}},
           "zero_optimization": {{"stage": {stage}, "stage3_param_persistence_threshold": 0}}}}
engine, *_ = dslaunch.initialize(model=model, config=config)
x = torch.ones(2, 1024, device=engine.device, dtype=torch.bfloat16)

def step():
    engine.backward(engine(x).float().pow(2).mean())
    engine.step()

step()
numel = sum(param.numel() for param in model.parameters())
before = {{name: param.detach().clone().cpu() for name, param in model.named_parameters()}}
full = torch.cuda.memory_allocated()
for pin_memory in (True, False):
    engine.offload_states(pin_memory=pin_memory, non_blocking=True)
    freed = full - torch.cuda.memory_allocated()
    assert freed >= 0.99 * 14 * numel, (freed, numel)  # bf16 parameter, float32 master, two moments
    engine.reload_states(non_blocking=True)
    assert torch.cuda.memory_allocated() <= 1.01 * full
assert all(torch.equal(before[name], param.detach().cpu()) for name, param in model.named_parameters())
step()
torch.distributed.destroy_process_group()
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stage", STAGES)
def test_on_a_gpu_the_memory_is_the_devices_again(stage: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_GPU.format(stage=stage, optimizer=ADAMW)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr

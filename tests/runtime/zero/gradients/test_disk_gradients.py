"""Gradients in files: what goes wrong in a backward, or in a step, leaves the training as it would have
been without them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dslaunch
from dslaunch import ConfigError, zero
from dslaunch.runtime.errors import OffloadError
from dslaunch.runtime.offload.outbox import AT_ONCE
from dslaunch.runtime.zero.gradients.disk_gradients import DiskGradients
from tests.runtime.models import assert_same_bits, batch, make_config, make_model, snapshot, train_engine
from tests.runtime.offload.residences import ON_DEVICE, Where, make_engine
from tests.runtime.offload.test_disk import small_disk as small_disk
from tests.runtime.ranks import Ranks

ON_DISK = Where("nvme", "none", is_apart=False)
BOTH = (ON_DEVICE, ON_DISK)
WIDE = {"gradient_accumulation_steps": 3, "data_types": {"grad_accum_dtype": "fp32"}}


def _backward(engine: Any, seed: int, *, factor: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> None:
    engine.backward(engine(batch(seed).to(dtype)).float().square().mean() * factor)


def test_after_a_backward_few_gradients_are_in_memory(tmp_path: Path) -> None:
    engine = make_engine(2, "bf16", ON_DISK, str(tmp_path))
    _backward(engine, 0)
    kept = [sub_buffer.gradients for sub_buffer in engine.optimizer.sub_buffers]
    assert all(isinstance(one, DiskGradients) for one in kept)
    here = [one for one in kept if not any(value.isnan().all() for value in one._value.values())]
    assert len(kept) > AT_ONCE == len(here)
    assert all(param.grad is None for param in engine.module.parameters())
    before = zero.safe_get_full_grad(engine.module.first.weight)
    engine.offload_states(include=["lp_grads"])
    with pytest.raises(ConfigError, match="lp_grads"):
        engine.step()
    engine.reload_states()
    assert torch.equal(zero.safe_get_full_grad(engine.module.first.weight), before)
    engine.destroy()


def test_an_overflow_skips_a_step_and_nothing_else(tmp_path: Path) -> None:
    ends = []
    for where in BOTH:
        engine = make_engine(2, "fp16", where, str(tmp_path))
        for step in range(4):
            _backward(engine, step, factor=1e30 if step == 1 else 1.0, dtype=torch.float16)
            engine.step()
        assert engine.skipped_steps == 1
        ends.append((snapshot(engine.state_dict()), engine.optimizer.loss_scale))
        engine.destroy()
    assert ends[0][1] == ends[1][1]
    assert_same_bits(ends[0][0], ends[1][0])


def test_a_step_without_a_backward_is_one_with_zeros(tmp_path: Path) -> None:
    ends = []
    for where in BOTH:
        engine = make_engine(2, "bf16", where, str(tmp_path))
        for step in range(3):
            if step != 1:
                _backward(engine, step)
            engine.step()
            assert (engine.get_global_grad_norm() == 0) == (step == 1)
        ends.append(snapshot(engine.state_dict()))
        engine.destroy()
    assert_same_bits(*ends)


class Fails(nn.Module):
    """Its backward fails when it is told so, halfway."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(6))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if place == 2 and self.fails:
                x.register_hook(self._fail)  # type: ignore[no-untyped-call]
        return x

    def _fail(self, grad: torch.Tensor) -> None:
        raise ArithmeticError("halfway")


def _after_a_failure(where: Where, folder: str, *, fails: bool) -> dict[str, torch.Tensor]:
    engine = make_engine(2, "bf16", where, folder, kind=Fails, reduce_bucket_size=1, **WIDE)
    train_engine(engine, steps=2, dtype=torch.bfloat16)
    if fails:
        _backward(engine, 7)  # the sum of the next one is read while it fails
        engine.module.fails = True
        with pytest.raises(ArithmeticError, match="halfway"):
            _backward(engine, 8)
        engine.module.fails = False
        engine.zero_grad()
    train_engine(engine, steps=2, first=2, dtype=torch.bfloat16)
    end = snapshot(engine.state_dict())
    engine.destroy()
    return end


def test_a_backward_that_fails_halfway_is_forgotten_with_the_others(tmp_path: Path) -> None:
    on_device = _after_a_failure(ON_DEVICE, "", fails=False)
    assert_same_bits(_after_a_failure(ON_DISK, str(tmp_path), fails=True), on_device)


@pytest.mark.filterwarnings("ignore:.*direct")
def test_a_disk_that_is_full_for_sums_is_told_in_one_line_and_training_goes_on_when_it_is_not(
    small_disk: Path,
) -> None:
    def resize(kibibytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kibibytes}k", str(small_disk)], check=True)

    engine = make_engine(2, "bf16", ON_DISK, str(small_disk), kind=Fails, reduce_bucket_size=1, **WIDE)
    used = sum(path.stat().st_size for path in small_disk.rglob("*") if path.is_file()) // 1024
    resize(used + 3 * 4)  # the sums of two units, and the lock file; each is less than a page
    _backward(engine, 7)
    engine.step()
    with pytest.raises(OffloadError, match=f"offloading to NVMe: .*{small_disk}") as caught:
        _backward(engine, 8)
    assert "\n" not in str(caught.value)
    resize(1024)
    engine.zero_grad()
    engine.step()  # the second micro batch of three is lost; the third is none
    engine.step()
    train_engine(engine, steps=2, dtype=torch.bfloat16)
    plain = make_engine(2, "bf16", ON_DEVICE, "", kind=Fails, reduce_bucket_size=1, **WIDE)
    for _ in range(3):
        plain.step()
    train_engine(plain, steps=2, dtype=torch.bfloat16)
    assert_same_bits(snapshot(engine.state_dict()), snapshot(plain.state_dict()))
    for one in (engine, plain):
        one.destroy()


def _groups_of_one(rank: int, where: Where, folder: str) -> dict[str, Any]:
    """Each rank has all, and a half of it is its part of the norm."""
    config = make_config(stage=3, bf16={"enabled": True}, gradient_clipping=0.3)
    config["zero_optimization"] |= {
        "mics_shard_size": 1,
        "offload_optimizer": {"device": where.states, "nvme_path": folder},
    }
    engine = dslaunch.initialize(model=make_model(), config=config)[0]
    norms = []
    for step in range(3):
        train_engine(engine, steps=1, first=step, dtype=torch.bfloat16)
        norms.append(engine.get_global_grad_norm())
    end = {"norms": norms, "params": snapshot(engine.state_dict())}
    engine.destroy()
    return end


@pytest.mark.slow
def test_the_norm_is_of_a_rank_s_part_where_shards_are_replicated(ranks: Ranks, tmp_path: Path) -> None:
    on_device = ranks(_groups_of_one, ON_DEVICE, "", world_size=2)[0]
    away = ranks(_groups_of_one, ON_DISK, str(tmp_path), world_size=2)[0]
    assert away["norms"] == on_device["norms"]
    assert_same_bits(away["params"], on_device["params"])

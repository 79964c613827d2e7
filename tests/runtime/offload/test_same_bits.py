"""Parameters and optimizer states in host memory or on a disk: the same training, bit for bit,
wherever they lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError, zero
from tests.exhaustive import few
from tests.runtime.models import assert_same_bits, batch, make_config, snapshot, train_engine
from tests.runtime.offload.residences import AWAY, DTYPES, ON_DEVICE, Where, away_at, make_engine
from tests.runtime.ranks import Ranks

STEPS = 4
SUMMED = 1e-14  # a norm is a sum in float64, in parts that lie where the gradients do


def _train(rank: int, stage: int, precision: str, where: Where, folder: str) -> dict[str, Any]:
    engine = make_engine(stage, precision, where, folder)
    for sub_buffer in engine.optimizer.sub_buffers:
        assert sub_buffer.residence.steps_on_host == (where.is_apart and where.states != "none")
        assert sub_buffer.residence.params_on_host == (
            where.is_apart and where.parameters != "none" and stage == 3
        )
    norms = []
    for step in range(STEPS):
        train_engine(engine, steps=1, first=step, dtype=DTYPES[precision])
        norms.append(engine.get_global_grad_norm())
    names = dict(engine.module.named_parameters())
    found = {
        "params": snapshot(engine.state_dict()),
        "masters": {name: zero.safe_get_full_fp32_param(param) for name, param in names.items()},
        "exp_avg": {
            name: zero.safe_get_full_optimizer_state(param, "exp_avg") for name, param in names.items()
        },
        "norms": norms,
    }
    engine.destroy()
    found["destroyed"] = snapshot(engine.module.named_parameters())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision", "world_size"),
    few(
        [
            (stage, *row)
            for stage in (1, 2, 3)
            for row in (("fp32", 3), ("fp32", 1), ("bf16", 1), ("bf16", 2), ("fp16", 2))
        ],
        lambda stage, precision, world_size: (stage, precision, world_size) == (3, "bf16", 2),
    ),
)
def test_training_has_the_same_bits_wherever_the_states_lie(
    ranks: Ranks, tmp_path: Path, stage: int, precision: str, world_size: int
) -> None:
    on_device = ranks(_train, stage, precision, ON_DEVICE, "", world_size=world_size)[0]
    for where in away_at(stage):
        away = ranks(_train, stage, precision, where, str(tmp_path), world_size=world_size)[0]
        assert away["norms"] == pytest.approx(on_device["norms"], rel=SUMMED), where
        for kind in ("params", "masters", "exp_avg", "destroyed"):
            assert_same_bits(away[kind], on_device[kind])
        assert not list(tmp_path.iterdir()), "destroy() leaves nothing behind"


def _micro_batches(rank: int, stage: int, where: Where, folder: str) -> dict[str, Any]:
    """Three micro batches a step, of which the last step's gradients are read and set before it ends."""
    # One rank alone would add up in bfloat16 on the device, and in float32 away from it.
    wide = {"grad_accum_dtype": "fp32"}
    engine = make_engine(stage, "bf16", where, folder, gradient_accumulation_steps=3, data_types=wide)
    train_engine(engine, steps=2, dtype=torch.bfloat16)
    own = batch(9).chunk(engine.world_size)[rank].bfloat16()
    weight = engine.module.first.weight
    norms = [engine.get_global_grad_norm()]
    for micro in range(3):
        engine.backward(engine(own).float().square().mean())
        if micro == 1:
            between = zero.safe_get_full_grad(weight)
            zero.safe_set_full_grad(weight, between * 0.5)
        engine.step()
    found = {"between": {"first.weight": between}, "params": snapshot(engine.state_dict())}
    engine.zero_grad()
    found["norms"] = [*norms, engine.get_global_grad_norm()]
    engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", few([2, 3], lambda stage: stage == 3))
@pytest.mark.parametrize("world_size", few([1, 2], lambda world_size: world_size == 2))
def test_micro_batches_add_up_to_the_same_bits(
    ranks: Ranks, tmp_path: Path, stage: int, world_size: int
) -> None:
    on_device = ranks(_micro_batches, stage, ON_DEVICE, "", world_size=world_size)[0]
    for where in away_at(stage):
        away = ranks(_micro_batches, stage, where, str(tmp_path), world_size=world_size)[0]
        assert away["norms"] == pytest.approx(on_device["norms"], rel=SUMMED)
        for kind in ("between", "params"):
            assert_same_bits(away[kind], on_device[kind])


def _edits(rank: int, where: Where, folder: str) -> dict[str, Any]:
    """Everything that reads or writes parameters, masters and states from outside, between steps."""
    engine = make_engine(3, "bf16", where, folder)
    train_engine(engine, steps=1, dtype=torch.bfloat16)
    params = dict(engine.module.named_parameters())
    weight, bias = params["first.weight"], params["last.bias"]
    zero.safe_set_full_fp32_param(weight, torch.linspace(-1, 1, 105).view(15, 7))
    zero.safe_set_full_optimizer_state(weight, torch.full((15, 7), 0.25), "exp_avg")
    own = zero.safe_get_local_fp32_param(bias)
    if own is not None and engine.world_size > 1:  # alone on its device, nothing is sharded
        zero.safe_set_local_fp32_param(bias, own + 1)
        state = zero.safe_get_local_optimizer_state(bias, "exp_avg_sq")
        assert state is not None
        zero.safe_set_local_optimizer_state(bias, state * 4, "exp_avg_sq")
    with zero.GatheredParameters([params["norm.weight"]], modifier_rank=0):
        if rank == 0:
            params["norm.weight"].data.fill_(0.5)
    with torch.no_grad():
        before = engine(batch(3).bfloat16())
    train_engine(engine, steps=2, first=1, dtype=torch.bfloat16)
    engine.offload_states()
    engine.reload_states()
    train_engine(engine, steps=1, first=3, dtype=torch.bfloat16)
    found = {
        "params": snapshot(engine.state_dict()),
        "masters": {name: zero.safe_get_full_fp32_param(param) for name, param in params.items()},
        "before": {"output": before},
    }
    engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", few([1, 2], lambda world_size: world_size == 2))
def test_edits_from_outside_count_the_same(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    on_device = ranks(_edits, ON_DEVICE, "", world_size=world_size)[0]
    for where in AWAY:
        away = ranks(_edits, where, str(tmp_path), world_size=world_size)[0]
        for kind, values in on_device.items():
            assert_same_bits(away[kind], values)


class HalfFrozen(nn.Module):
    """Frozen blocks around a trained one, as with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(7, 31), nn.Linear(31, 33), nn.Linear(33, 1))
        for place in (0, 2):
            self.blocks[place].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


def _checkpoint(
    rank: int, stages: tuple[int, int], residences: tuple[Where, Where], folder: str
) -> dict[str, Any]:
    """Written where values are in the first residence, read into the second, and trained on."""
    spills, files = f"{folder}/spills", f"{folder}/checkpoint"
    writer = make_engine(stages[0], "bf16", residences[0], spills, kind=HalfFrozen)
    train_engine(writer, steps=2, dtype=torch.bfloat16)
    writer.save_checkpoint(files)
    reader = make_engine(stages[1], "bf16", residences[1], spills, kind=HalfFrozen)
    assert reader.load_checkpoint(files)[0] is not None
    train_engine(reader, steps=2, first=2, dtype=torch.bfloat16)
    train_engine(writer, steps=2, first=2, dtype=torch.bfloat16)
    found = [snapshot(engine.state_dict()) for engine in (writer, reader)]
    for engine in (writer, reader):
        engine.destroy()
    return {"writer": found[0], "reader": found[1]}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", few([1, 2], lambda world_size: world_size == 2))
def test_a_checkpoint_loads_into_any_residence(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    (tmp_path / "spills").mkdir()
    everywhere = (ON_DEVICE, *AWAY)
    pairs = [(one, everywhere[(place + 1) % len(everywhere)]) for place, one in enumerate(everywhere)]
    for number, residences in enumerate(pairs):
        folder = tmp_path / str(number)
        (folder / "spills").mkdir(parents=True)
        found = ranks(_checkpoint, (3, 3), residences, str(folder), world_size=world_size)[0]
        assert_same_bits(found["reader"], found["writer"])


def _share(rank: int, ratio: float, folder: str) -> dict[str, Any]:
    where = Where("cpu", "none", is_apart=True, ratio=ratio)
    engine = make_engine(2, "bf16", where, folder, reduce_bucket_size=10**6)
    train_engine(engine, steps=3, dtype=torch.bfloat16)
    sub_buffers = engine.optimizer.sub_buffers
    away = sum(sub_buffer.layout.numel for sub_buffer in sub_buffers if sub_buffer.residence.steps_on_host)
    return {
        "params": snapshot(engine.state_dict()),
        "share": away / sum(sub_buffer.layout.numel for sub_buffer in sub_buffers),
    }


@pytest.mark.slow
@pytest.mark.parametrize("world_size", few([1, 2], lambda world_size: world_size == 2))
def test_a_share_of_the_states_leaves_the_device(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    found = {
        ratio: ranks(_share, ratio, str(tmp_path), world_size=world_size)[0] for ratio in (0.0, 0.3, 0.7, 1.0)
    }
    assert found[0.0]["share"] == 0
    assert found[1.0]["share"] == 1
    # a unit is not cut: here, up to a block of 527 of 1,969 elements
    assert 0.3 <= found[0.3]["share"] <= 0.3 + 0.3
    assert 0.7 <= found[0.7]["share"] <= 1
    for one in found.values():
        assert_same_bits(one["params"], found[0.0]["params"])


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        (0, {}, r'offload_optimizer.device "cpu": at stage 0 every rank has all optimizer states'),
    ],
)
def test_what_cannot_leave_is_refused(stage: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(stage, "fp32", Where("cpu", "none", is_apart=True), "", **changes)


def test_parameters_that_every_rank_has_cannot_leave() -> None:
    config = make_config(stage=2)
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    with pytest.raises(
        ConfigError, match=r'offload_param.device "cpu": at stage 2 every rank has all parameters'
    ):
        dslaunch.initialize(model=HalfFrozen(), config=config)


def test_on_cpus_alone_host_memory_is_no_other_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="dslaunch"):
        engine = make_engine(3, "fp32", Where("cpu", "cpu", is_apart=False), "")
    assert not any(
        sub_buffer.residence.steps_on_host or sub_buffer.residence.params_on_host
        for sub_buffer in engine.optimizer.sub_buffers
    )
    told = [record.message for record in caplog.records if "has no effect" in record.message]
    assert len(told) == 2, told
    engine.destroy()

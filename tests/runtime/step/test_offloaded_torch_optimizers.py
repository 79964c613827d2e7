"""Optimizers of torch whose states leave the device between steps: the bits of those that stay there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError, zero
from tests.exhaustive import few
from tests.runtime.models import Uneven, assert_same_bits, batch, loss_of, make_config, make_model, snapshot
from tests.runtime.offload.residences import AWAY, DTYPES, ON_DEVICE, PRECISIONS, Where, pretended
from tests.runtime.ranks import Ranks
from tests.runtime.step.test_torch_optimizer_rule import Halving

STEPS = 3
CPU, NVME = Where("cpu", "none", is_apart=True), Where("nvme", "none", is_apart=False)


class Alone(Halving):
    """An optimizer that counts its calls in its groups, and steps each parameter by itself."""

    is_per_parameter = True


MUON = {"type": "Muon", "params": {"muon_lr": 0.05, "adam_lr": 0.003, "weight_decay": 0.1}}
FROM_CONFIG: dict[str, dict[str, Any]] = {"Muon": MUON, "LAMB": {"type": "LAMB", "params": {"lr": 0.02}}}
KINDS: dict[str, Any] = {
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.02),
    "Alone": lambda model: Alone(model.parameters(), lr=0.1),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
}


def make_engine(
    name: str,
    stage: int,
    precision: str,
    where: Where,
    folder: str,
    *,
    sections: dict[str, Any] | None = None,
) -> dslaunch.Engine:
    """Return an engine of that optimizer, with units of one layer; `sections` say where values lie instead of
    `where`.
    """
    config = make_config(stage=stage, reduce_bucket_size=50, gradient_clipping=0.3, **PRECISIONS[precision])
    config["optimizer"] = FROM_CONFIG.get(name)
    zero_section = config["zero_optimization"]
    zero_section["offload_optimizer"] = {
        "device": where.states,
        "nvme_path": folder,
        "ratio": where.ratio,
    }
    if stage == 3:
        zero_section["offload_param"] = {"device": where.parameters, "nvme_path": folder}
    if sections is not None:
        zero_section.update({"offload_optimizer": {}, "offload_param": {}, **sections})
    model = make_model(Uneven)
    optimizer = KINDS[name](model) if name in KINDS else None
    with pretended(where.is_apart):
        return dslaunch.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: dslaunch.Engine, precision: str, *, first: int = 0, steps: int = STEPS) -> None:
    """Train on this rank's part of each batch."""
    for step in range(first, first + steps):
        own = batch(step).chunk(engine.world_size)[engine.global_rank]
        engine.backward(loss_of(engine, own.to(engine.device).to(DTYPES[precision])))
        engine.step()


def values_of(engine: dslaunch.Engine, name: str) -> dict[str, Tensor]:
    """Return parameters, masters, and one state of each parameter."""
    key = {"NAdam": "exp_avg", "Adafactor": "variance", "Alone": "sum", "LAMB": "exp_avg"}
    values = {}
    for param_name, param in engine.module.named_parameters():
        is_muon = name == "Muon" and param.ndim > 1
        state = "momentum_buffer" if is_muon else key.get(name, "exp_avg")
        if name == "Adafactor" and param.ndim > 1:
            state = "row_var"
        values[param_name] = zero.safe_get_full_fp32_param(param)
        values[f"state {param_name}"] = zero.safe_get_full_optimizer_state(param, state)
    values |= {f"shown {key}": value for key, value in snapshot(engine.module.named_parameters()).items()}
    return {key: value.cpu() for key, value in values.items() if value is not None}


def _trained(name: str, stage: int, precision: str, where: Where, folder: str) -> dict[str, Tensor]:
    engine = make_engine(name, stage, precision, where, folder)
    train(engine, precision)
    values = values_of(engine, name)
    engine.destroy()
    return values


def _wherever(rank: int, name: str, precision: str, stage: int, folder: str) -> None:
    expected = _trained(name, stage, precision, ON_DEVICE, folder)
    assert len(expected) == 3 * len(list(make_model().parameters()))
    for where in (*AWAY, CPU._replace(ratio=0.5)):
        if stage == 3 or where.parameters == "none":
            assert_same_bits(_trained(name, stage, precision, where, folder), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "world_size", "stage"),
    few(
        [
            (name, precision, world_size, stage)
            for name in (*FROM_CONFIG, *KINDS)
            for precision, world_size in (("bf16", 2), ("fp32", 1), ("fp32", 3), ("fp16", 2))
            for stage in (1, 2, 3)
        ],
        lambda name, precision, world_size, stage: (
            (name, world_size, stage) in (("Muon", 3, 3), ("Alone", 1, 2), ("LAMB", 3, 1))
        ),
    ),
)
def test_bits_are_the_same_wherever_states_lie(
    ranks: Ranks, tmp_path: Path, name: str, precision: str, world_size: int, stage: int
) -> None:
    ranks(_wherever, name, precision, stage, str(tmp_path), world_size=world_size)


# ---- steps that are skipped

RECOVERED = 6


def _overflowing(name: str, stage: int, where: Where, folder: str) -> dict[str, Tensor]:
    """Train in fp16 with infinite gradients of one rank in the second and third step."""
    engine = make_engine(name, stage, "fp16", where, folder)
    train(engine, "fp16", steps=1)
    after = values_of(engine, name)
    for step in range(1, RECOVERED):
        before, own = after, batch(step).chunk(engine.world_size)[engine.global_rank].half()
        is_over = step in (1, 2)
        loss = loss_of(engine, own)
        engine.backward(loss * float("inf") if is_over and engine.global_rank == 0 else loss)
        engine.step()
        after = values_of(engine, name)
        if is_over:
            assert_same_bits(after, before)
        else:
            changed = [key for key, value in after.items() if not torch.equal(value, before[key])]
            assert len(changed) > len(after) // 2
    assert engine.skipped_steps == 2
    assert all(value.isfinite().all() for value in after.values())
    engine.destroy()
    return after


def _overflow(rank: int, folder: str) -> None:
    for name, stage in (("Muon", 3), ("Muon", 2), ("LAMB", 1)):
        expected = _overflowing(name, stage, ON_DEVICE, folder)
        for where in (CPU, CPU._replace(ratio=0.5), NVME):
            assert_same_bits(_overflowing(name, stage, where, folder), expected)


@pytest.mark.slow
def test_a_step_that_overflows_leaves_all_that_is_away_as_it_was_and_training_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(_overflow, str(tmp_path), world_size=2)


# ---- on the fake CUDA device


PINNED, PLAIN = {"device": "cpu", "pin_memory": True}, {"device": "cpu", "pin_memory": False}


def _on_cuda(rank: int, name: str, stage: int, precision: str, sections: dict[str, Any]) -> dict[str, Tensor]:
    engine = make_engine(name, stage, precision, ON_DEVICE, "", sections=sections)
    assert engine.device == torch.device("cuda", rank)
    train(engine, precision)
    for sub_buffer in engine.optimizer.sub_buffers:  # type: ignore[union-attr]
        shard = sub_buffer.optimizer_shard
        at_rest = [shard.master, *shard.states.values(), *(value for *_, value in shard.whole_states())]
        is_away = "offload_optimizer" in sections
        assert {one.device.type for one in at_rest} == {"cpu" if is_away else "cuda"}
    values = values_of(engine, name)
    engine.destroy()
    return values


def _everywhere_on_cuda(rank: int, name: str, precision: str, stage: int, folder: str) -> None:
    disk = {"device": "nvme", "nvme_path": folder}
    expected = _on_cuda(rank, name, stage, precision, {})
    for away in (PINNED, PLAIN, disk):
        sections = {"offload_optimizer": away}
        assert_same_bits(_on_cuda(rank, name, stage, precision, sections), expected)
        if stage == 3 and away is not PLAIN:
            sections["offload_param"] = away
            assert_same_bits(_on_cuda(rank, name, stage, precision, sections), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "world_size", "stage"),
    few(
        [
            (name, precision, world_size, stage)
            for name in ("Muon", "LAMB", "NAdam")
            for precision, world_size in (("bf16", 2), ("fp32", 1), ("bf16", 3), ("fp32", 2))
            for stage in (1, 2, 3)
        ],
        lambda name, precision, world_size, stage: (
            (name, precision, world_size, stage) == ("Muon", "bf16", 2, 3)
        ),
    ),
)
def test_on_a_cuda_device_bits_are_the_same_wherever_states_lie(
    cuda_ranks: Ranks, tmp_path: Path, name: str, precision: str, world_size: int, stage: int
) -> None:
    """The kind of DeepSpeed#8463: with states in host memory Muon trained differently."""
    cuda_ranks(_everywhere_on_cuda, name, precision, stage, str(tmp_path), world_size=world_size)


# ---- checkpoints

SAVED = 2


def _save(rank: int, name: str, stage: int, where: Where, folder: str, disk: str) -> dict[str, Tensor]:
    engine = make_engine(name, stage, "bf16", where, disk)
    train(engine, "bf16", steps=SAVED)
    engine.save_checkpoint(folder)
    values = values_of(engine, name)
    engine.destroy()
    return values


def _load(rank: int, name: str, stage: int, where: Where, folder: str, disk: str) -> list[dict[str, Tensor]]:
    """Return what is there after loading, and after one more step."""
    engine = make_engine(name, stage, "bf16", where, disk)
    train(engine, "bf16", first=7, steps=1)  # what it has before is forgotten
    engine.load_checkpoint(folder)
    loaded = values_of(engine, name)
    train(engine, "bf16", first=SAVED, steps=1)
    values = values_of(engine, name)
    engine.destroy()
    return [loaded, values]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ways"),
    few(
        [(name, num_ways) for name in ("Muon", "Alone", "LAMB") for num_ways in (1, 4)],
        lambda name, num_ways: (name, num_ways) == ("Muon", 1),
    ),
)
def test_a_checkpoint_of_any_place_and_number_of_ranks_loads_into_any_other(
    ranks: Ranks, tmp_path: Path, name: str, num_ways: int
) -> None:
    disk, both = str(tmp_path), Where("nvme", "nvme", is_apart=True)
    ways = [(2, 2, ON_DEVICE), (3, 1, CPU), (2, 3, both), (1, 2, NVME)]
    for number, (world_size, stage, where) in enumerate(ways):
        folder = str(tmp_path / str(number))
        saved = ranks(_save, name, stage, where, folder, disk, world_size=world_size)[0]
        followed: dict[int, dict[str, Tensor]] = {}
        for to_size, to_stage, to_where in (ways * 2)[number + 1 : number + 1 + num_ways]:
            loaded, after = ranks(_load, name, to_stage, to_where, folder, disk, world_size=to_size)[0]
            assert_same_bits(loaded, saved)
            assert_same_bits(after, followed.setdefault(to_size, after))


# ---- refusals


def test_an_optimizer_that_may_look_at_several_parameters_is_refused() -> None:
    model = nn.Linear(2, 2)
    config = make_config(stage=2)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with (
        pretended(True),
        pytest.raises(
            ConfigError,
            match=r'offload_optimizer.device "cpu": Halving may compute with several .* is_per_par',
        ),
    ):
        dslaunch.initialize(model=model, optimizer=Halving(model.parameters()), config=config)

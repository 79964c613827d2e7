"""Checkpoints: any stage and any number of ranks read what any other wrote."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import CheckpointError
from dslaunch.runtime.checkpoint.format import check_is_plain, write_atomically
from dslaunch.runtime.checkpoint.reader import CheckpointReader
from dslaunch.runtime.checkpoint.store import open_store
from dslaunch.runtime.config import load_config
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

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.02}}
WORLDS = (1, 2, 4)
MORE = 3  # steps after the checkpoint


class WithCounter(nn.Module):
    """A buffer that training changes, a frozen layer, and two groups of shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(7, 15), nn.Linear(15, 17))
        self.frozen = nn.Linear(17, 15)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(15, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.codes = nn.Parameter(torch.randint(0, 9, (3,)), requires_grad=False)
        self.note = "none"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.last(self.frozen(self.blocks(x)))
        return y


def _make(
    stage: int, bf16: bool, *, seed: int = 0, kind: type[nn.Module] = WithCounter, **changes: Any
) -> Any:
    config = make_config(
        stage=stage, bf16={"enabled": bf16}, scheduler=WARMUP, reduce_bucket_size=1, **changes
    )
    engine, *_ = dslaunch.initialize(model=make_model(kind, seed=seed), config=config)
    return engine


def _run(engine: Any, *, first: int, steps: int) -> None:
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    train_engine(engine, steps=steps, first=first, dtype=dtype)


def _tensors(engine: Any) -> dict[str, Tensor]:
    return snapshot({name: value for name, value in engine.state_dict().items() if torch.is_tensor(value)})


def _whole_state(engine: Any) -> dict[str, Tensor]:
    """Every parameter, buffer, master and optimizer state by name, unsharded, on every rank."""
    state = _tensors(engine)
    for part, states in zip(engine.optimizer.parts, engine.optimizer.states, strict=True):
        for kind, shard in {"master": part.master, **states}.items():
            whole = torch.zeros(part.layout.numel)
            start, stop = part.layout.shard_range(part.shard_index, num_shards=part.num_shards)
            whole[start:stop] = shard
            if part.num_shards > 1:
                torch.distributed.all_reduce(whole)
            for member, slot in zip(part.members, part.layout.slots, strict=True):
                state[f"{member.name} {kind}"] = whole[slot.offset : slot.offset + slot.numel].view(
                    slot.shape
                )
    return state


def _save(
    rank: int, folder: str, stage: int, bf16: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Return the state when saving, and the state and lr of the same run three steps later."""
    engine = _make(stage, bf16)
    engine.module.note = "kept"
    _run(engine, first=0, steps=4)
    assert engine.save_checkpoint(folder, client_state={"epoch": 3, "seen": torch.arange(2)})
    saved = _whole_state(engine)
    _run(engine, first=4, steps=MORE)
    return saved, _whole_state(engine), engine.get_lr()


def _load(
    rank: int, folder: str, stage: int, bf16: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], tuple[Any, ...]]:
    engine = _make(stage, bf16, seed=99)
    _run(engine, first=50, steps=1)  # whatever was there must be gone
    path, client_state = engine.load_checkpoint(folder)
    assert (client_state["epoch"], client_state["seen"].tolist()) == (3, [0, 1])
    assert path == str(Path(folder) / "global_step4")
    counters = (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps)
    loaded = _whole_state(engine)
    assert engine.module.note == "kept"
    _run(engine, first=4, steps=MORE)
    return loaded, _whole_state(engine), engine.get_lr(), counters


# Worlds of different size add gradients in different order; three AdamW steps after it. Seen: 6.0e-8.
OTHER_WORLD = 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("wrote", WORLDS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_any_stage_and_world_reads_what_any_other_wrote(
    ranks: Ranks, tmp_path: Path, stage: int, wrote: int
) -> None:
    """The state is equal to the bit; so are the next steps if the world is the same."""
    saved, later, lr = ranks(_save, str(tmp_path), stage, False, world_size=wrote)[0]
    for reader_stage in (0, 1, 2, 3):
        for reads in WORLDS:
            loaded, continued, new_lr, counters = ranks(
                _load, str(tmp_path), reader_stage, False, world_size=reads
            )[-1]
            assert_same_bits(loaded, saved)
            assert counters == (4, 48, 0, 4)
            assert new_lr == lr
            if reads == wrote:
                assert_same_bits(continued, later)
            else:
                assert worst_difference(continued, later) <= OTHER_WORLD


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "wrote", "reader_stage", "reads"), [(1, 2, 0, 2), (0, 2, 1, 4), (1, 4, 1, 1)]
)
def test_bf16_keeps_masters_to_the_bit(
    ranks: Ranks, tmp_path: Path, stage: int, wrote: int, reader_stage: int, reads: int
) -> None:
    saved, later, _ = ranks(_save, str(tmp_path), stage, True, world_size=wrote)[0]
    loaded, continued, _, _ = ranks(_load, str(tmp_path), reader_stage, True, world_size=reads)[0]
    assert_same_bits(loaded, saved)
    if reads == wrote:
        assert_same_bits(continued, later)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 15)

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.layer(x), 0.5, True) * random.random()


def _random_numbers(rank: int, folder: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(rank)
    random.seed(rank)
    engine = _make(1, False, kind=Drops)
    engine.save_checkpoint(folder)
    first = train_engine(engine, steps=2)
    engine.load_checkpoint(folder)
    return first, train_engine(engine, steps=2)


def test_random_numbers_continue_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for first, again in ranks(_random_numbers, str(tmp_path), world_size=2):
        assert first == again


def _partial_loads(rank: int, folder: str) -> dict[str, Any]:
    engine = _make(1, False)
    _run(engine, first=0, steps=2)
    engine.save_checkpoint(folder, tag="mine", save_latest=False)
    fresh = _make(1, False, seed=7)
    fresh.load_checkpoint(folder, tag="mine", load_module_only=True)
    assert_same_bits(_tensors(fresh), _tensors(engine))
    assert not any(states["exp_avg"].any() for states in fresh.optimizer.states)
    return {"steps": fresh.global_steps, "lr": fresh.get_lr(), "applied": fresh.optimizer.num_steps}


def test_load_module_only_takes_the_weights_and_buffers_alone(ranks: Ranks, tmp_path: Path) -> None:
    for result in ranks(_partial_loads, str(tmp_path), world_size=2):
        assert result == {"steps": 0, "lr": [0.0], "applied": 0}
    assert not (tmp_path / "latest").exists()


# ---- what cannot be loaded or saved


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(7, 15), nn.Linear(15, 18))
        self.extra = nn.Linear(18, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.extra(self.blocks(x))
        return y


def _refusals(rank: int, folder: str) -> list[str]:
    messages: list[str] = []

    def refused(action: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            action()
        messages.append(str(caught.value))

    root = Path(folder)
    engine = _make(1, False)
    refused(lambda: engine.load_checkpoint(root / "nowhere"))
    engine.save_checkpoint(root)
    refused(lambda: engine.load_checkpoint(root, tag="global_step7"))
    other = _make(1, False, kind=Other)
    before = snapshot(other.module.state_dict())
    refused(lambda: other.load_checkpoint(root))
    refused(lambda: other.load_checkpoint(root, load_module_strict=False))
    sgd = _make(1, False, optimizer={"type": "SGD", "params": {"momentum": 0.9}})
    refused(lambda: sgd.load_checkpoint(root))
    assert_same_bits(before, snapshot(other.module.state_dict()))
    refused(lambda: engine.save_checkpoint(root, client_state={"best": {"model": Other}}))
    if rank == 0:
        (root / "global_step0" / "training.pt").write_bytes(b"not a checkpoint")
    torch.distributed.barrier()
    refused(lambda: engine.load_checkpoint(root))
    refused(lambda: engine.optimizer.state_dict())
    return messages


def test_refusals_say_what_was_looked_for_and_what_differs(ranks: Ranks, tmp_path: Path) -> None:
    expected = (
        f"{tmp_path}/nowhere/latest does not exist",
        f"{tmp_path}/global_step7 is no checkpoint: manifest.json is not there; {tmp_path} holds global_step0",
        "parameters differ: only in the model: extra.bias, extra.weight; only in the checkpoint: frozen.bias",
        "parameter 'blocks.1.weight' has shape (17, 15) in the checkpoint and (18, 15) in the model",
        "the checkpoint's optimizer is AdamW, this run's is SGD; load with load_optimizer_states=False",
        "client_state['best']['model'] is a builtins.type",
        f"{tmp_path}/global_step0/training.pt has 16 bytes instead of ",
        "optimizer.state_dict() would be this rank's shard",
    )
    for messages in ranks(_refusals, str(tmp_path), world_size=2):
        assert len(messages) == len(expected)
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning)


def _unwritable(rank: int, folder: str) -> str:
    engine = _make(1, False)
    blocked = Path(folder) / "file"
    if rank == 0:
        blocked.write_text("a file where a folder should be")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(blocked)
    return str(caught.value)


def test_all_ranks_learn_that_rank_0_could_not_write(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(_unwritable, str(tmp_path), world_size=2):
        assert message.startswith(f"checkpoint {tmp_path}/file/global_step0 cannot be written on rank 0: ")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file: Any) -> None:
        file.write(b"half of the new")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        1.5,
        1j,
        "text",
        b"bytes",
        [1, (2, {3})],
        {"a": {1: torch.ones(2)}},
        torch.float32,
        torch.Size([1]),
    ],
)
def test_plain_values_can_be_saved_and_read_back(tmp_path: Path, value: Any) -> None:
    check_is_plain(value, "value")
    torch.save(value, tmp_path / "value")
    again = torch.load(tmp_path / "value", weights_only=True)
    assert str(again) == str(value)


def _tied_round_trip(rank: int, folder: str) -> bool:
    from tests.runtime.test_engine import Tied

    engine = _make(1, False, kind=Tied)
    _run(engine, first=0, steps=1)
    engine.save_checkpoint(folder)
    fresh = _make(0, False, kind=Tied, seed=3)
    fresh.load_checkpoint(folder)
    assert_same_bits(_whole_state(fresh), _whole_state(engine))
    return fresh.module.parts[0].weight is fresh.module.parts[2].weight


def test_tied_parameters_are_saved_once(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_tied_round_trip, str(tmp_path), world_size=2) == [True, True]
    reader = CheckpointReader(open_store(tmp_path), "global_step1")
    assert "model.parts.2.weight" not in reader.tensors()
    assert reader.training()["aliases"] == {"parts.2.weight": "parts.0.weight"}


def _other_accumulation(rank: int, folder: str) -> list[int]:
    engine = _make(0, False, gradient_accumulation_steps=3)
    train_engine(engine, steps=2)
    engine.save_checkpoint(folder)
    again = _make(0, False, gradient_accumulation_steps=2)
    again.load_checkpoint(folder)
    again.backward(loss_of(again, batch(0, size=6)))
    again.step()
    return [again.micro_steps, again.global_steps]


def test_accumulation_starts_afresh_after_loading(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_other_accumulation, str(tmp_path), world_size=1)[0] == [5, 2]


def _save_config(rank: int, folder: str) -> tuple[Any, dict[str, Any]]:
    engine = _make(2, True, gradient_clipping=1.0, fp16={"enabled": False}, steps_per_print=0)
    engine.set_train_batch_size(24)
    engine.save_checkpoint(folder, "here")
    return engine.config, torch.load(Path(folder) / "here" / "training.pt", weights_only=True)["config"]


def test_a_checkpoint_holds_the_configuration_in_effect_which_reads_back_the_same(
    ranks: Ranks, tmp_path: Path
) -> None:
    config, saved = ranks(_save_config, str(tmp_path), world_size=2)[0]
    assert config.train_batch_size == 24
    assert config.gradient_accumulation_steps == 2
    assert load_config(saved, world_size=2) == config

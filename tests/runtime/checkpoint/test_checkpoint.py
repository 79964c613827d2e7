"""Checkpoints: any stage and any number of ranks read what any other wrote."""

from __future__ import annotations

import logging
import os
import pickle
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dslaunch import CheckpointError
from dslaunch.runtime.checkpoint import save
from dslaunch.runtime.checkpoint.files.format import check_is_plain, write_atomically
from dslaunch.runtime.checkpoint.files.reader import CheckpointReader
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from dslaunch.runtime.config import load_config
from tests.runtime.checkpoint.states import WithCounter, make, run, tensors, whole_state
from tests.runtime.models import (
    assert_same_bits,
    batch,
    loss_of,
    snapshot,
    train_engine,
)
from tests.runtime.ranks import Ranks


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 15)

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.layer(x), 0.5, True) * random.random()


def _random_numbers(rank: int, folder: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(rank)
    random.seed(rank)
    engine = make(1, False, kind=Drops)
    engine.save_checkpoint(folder)
    first = train_engine(engine, steps=2)
    engine.load_checkpoint(folder)
    assert engine._wire.recorder.step == 1  # so that a report of a hang names the step that it is
    return first, train_engine(engine, steps=2)


def test_random_numbers_continue_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for first, again in ranks(_random_numbers, str(tmp_path), world_size=2):
        assert first == again


def _partial_loads(rank: int, folder: str) -> dict[str, Any]:
    engine = make(1, False)
    run(engine, first=0, steps=2)
    engine.save_checkpoint(folder, tag="mine", save_latest=False)
    fresh = make(1, False, seed=7)
    fresh.load_checkpoint(folder, tag="mine", load_module_only=True)
    assert_same_bits(tensors(fresh), tensors(engine))
    assert not any(states["exp_avg"].any() for states in fresh.optimizer.states)
    return {"steps": fresh.global_steps, "lr": fresh.get_lr(), "applied": fresh.optimizer.num_steps}


def test_load_module_only_takes_the_weights_and_buffers_alone(ranks: Ranks, tmp_path: Path) -> None:
    for result in ranks(_partial_loads, str(tmp_path), world_size=2):
        assert result == {"steps": 0, "lr": [0.0], "applied": 0}
    assert not (tmp_path / "latest").exists()


def _started_again(rank: int, folder: str) -> Any:
    with mock.patch.dict(os.environ, TORCHELASTIC_MAX_RESTARTS="1"):
        engine = make(1, False)
    return engine.load_checkpoint(folder)


def test_a_job_that_is_started_again_after_failures_may_find_no_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(_started_again, str(tmp_path), world_size=2) == [(None, {})] * 2


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
    engine = make(1, False)
    refused(lambda: engine.load_checkpoint(root / "nowhere"))
    engine.save_checkpoint(root)
    refused(lambda: engine.load_checkpoint(root, tag="global_step7"))
    other = make(1, False, kind=Other)
    before = snapshot(other.module.state_dict())
    refused(lambda: other.load_checkpoint(root))
    refused(lambda: other.load_checkpoint(root, load_module_strict=False))
    sgd = make(1, False, optimizer={"type": "SGD", "params": {"momentum": 0.9}})
    refused(lambda: sgd.load_checkpoint(root))
    assert_same_bits(before, snapshot(other.module.state_dict()))
    refused(lambda: engine.save_checkpoint(root, client_state={"best": {"model": Other}}))
    refused(lambda: engine.save_checkpoint(root, client_state=[1]))  # type: ignore[arg-type]
    refused(lambda: engine.save_checkpoint(root, tag=""))
    refused(lambda: engine.load_checkpoint(root, tag=""))
    refused(lambda: engine.save_checkpoint(""))
    refused(lambda: engine.save_checkpoint(None))  # type: ignore[arg-type]
    _with_manifest(engine, root, "[1]", lambda: refused(lambda: engine.load_checkpoint(root, tag="list")))
    if rank == 0:
        (root / "global_step0" / "training.pt").write_bytes(b"not a checkpoint")
    torch.distributed.barrier()
    refused(lambda: engine.load_checkpoint(root))
    assert [group["lr"] for group in engine.optimizer.state_dict()["param_groups"]] == engine.get_lr()
    refused(lambda: list(pickle.loads(pickle.dumps(engine.optimizer.state_dict()))["state"]))
    return messages


def _with_manifest(engine: Any, root: Path, text: str, do: Callable[[], object]) -> None:
    if engine.global_rank == 0:
        (root / "list").mkdir()
        (root / "list" / "manifest.json").write_text(text)
    torch.distributed.barrier()
    do()


def test_refusals_say_what_was_looked_for_and_what_differs(ranks: Ranks, tmp_path: Path) -> None:
    expected = (
        f"{tmp_path}/nowhere/latest does not exist",
        (
            f"{tmp_path}/global_step7 is no checkpoint: manifest.json is not there; "
            f"{tmp_path} holds global_step0"
        ),
        "parameters differ: only in the model: extra.bias, extra.weight; only in the checkpoint: frozen.bias",
        "parameter 'blocks.1.weight' has shape (17, 15) in the checkpoint and (18, 15) in the model; build",
        "the checkpoint's optimizer is AdamW, this run's is SGD; load with load_optimizer_states=False",
        "client_state['best']['model'] is a builtins.type",
        "save_checkpoint(client_state=[1]): must be a dict of names and values, ",
        "tag '' is no name of a folder; ",
        "tag '' is no name of a checkpoint; give one, or None for the one that latest names",
        "'' names no folder of checkpoints; give a path, or a URL such as s3://bucket/run",
        "None names no folder of checkpoints; ",
        f"{tmp_path}/list/manifest.json cannot be read: ValueError: it is no manifest of dslaunch's, ",
        f"{tmp_path}/global_step0/training.pt has 16 bytes instead of ",
        'optimizer.state_dict()["state"] would be this rank\'s shard',
    )
    for messages in ranks(_refusals, str(tmp_path), world_size=2):
        assert len(messages) == len(expected)
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning)


def _unwritable(rank: int, folder: str) -> str:
    engine = make(1, False)
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


def _into_other_folders(rank: int, folder: str) -> list[str]:
    engine = make(1, False)
    said = []
    for _ in range(2):
        with pytest.raises(CheckpointError) as failed:
            engine.save_checkpoint(f"{folder}/{rank}/of/the/job")
        said.append(str(failed.value))
    return said


def test_ranks_without_a_common_folder_are_told_so_each_time_and_leave_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    host = socket.gethostname()
    (tmp_path / "1/of/the").mkdir(parents=True)
    for said in ranks(_into_other_folders, str(tmp_path), world_size=2):
        for one in said:
            assert (
                f" on rank 1: {host} does not see the folder that rank 0 has made on {host}; give all" in one
            )
    assert [*(tmp_path / "1/of/the").iterdir()] == []
    assert [*(tmp_path / "0/of/the/job").iterdir()] == []


def _outlived(rank: int, folder: str) -> None:
    """The files are written when the process group is gone."""
    engine = make(3, True, checkpoint={"async_save": True})
    write = save.write_runs

    def late(*args: Any, **options: Any) -> Any:
        while torch.distributed.is_initialized():
            time.sleep(0.005)
        return write(*args, **options)

    save.write_runs = late
    engine.save_checkpoint(folder)
    torch.distributed.destroy_process_group()
    engine._saver.wait()
    save.write_runs = write
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)


def test_a_save_beside_training_outlives_the_process_group(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_outlived, str(tmp_path), world_size=2)
    CheckpointReader(open_store(tmp_path), "global_step0").verify()


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
    from tests.runtime.engine.test_engine import Tied

    engine = make(1, False, kind=Tied)
    run(engine, first=0, steps=1)
    engine.save_checkpoint(folder)
    fresh = make(0, False, kind=Tied, seed=3)
    fresh.load_checkpoint(folder)
    assert_same_bits(whole_state(fresh), whole_state(engine))
    return fresh.module.parts[0].weight is fresh.module.parts[2].weight


def test_tied_parameters_are_saved_once(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_tied_round_trip, str(tmp_path), world_size=2) == [True, True]
    reader = CheckpointReader(open_store(tmp_path), "global_step1")
    assert "model.parts.2.weight" not in reader.tensors()
    assert reader.training()["aliases"] == {"parts.2.weight": "parts.0.weight"}


class _WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(7, 15), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def _empty_round_trip(rank: int, folder: str) -> bool:
    optimizer = {"type": "Lamb", "params": {"lr": 0.01}}
    engine = make(2, False, kind=_WithEmpty, optimizer=optimizer)
    run(engine, first=0, steps=1)
    engine.save_checkpoint(folder)
    run(engine, first=1, steps=1)
    fresh = make(1, False, kind=_WithEmpty, seed=3, optimizer=optimizer)
    fresh.load_checkpoint(folder)
    run(fresh, first=1, steps=1)
    assert_same_bits(tensors(fresh), tensors(engine))
    return True


def test_a_parameter_without_elements_has_no_states_that_a_load_would_miss(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert all(ranks(_empty_round_trip, str(tmp_path), world_size=2))


def _other_accumulation(rank: int, folder: str) -> list[int]:
    engine = make(0, False, gradient_accumulation_steps=3)
    train_engine(engine, steps=2)
    engine.save_checkpoint(folder)
    again = make(0, False, gradient_accumulation_steps=2)
    again.load_checkpoint(folder)
    again.backward(loss_of(again, batch(0, size=6)))
    again.step()
    return [again.micro_steps, again.global_steps]


def test_accumulation_starts_afresh_after_loading(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_other_accumulation, str(tmp_path), world_size=1)[0] == [5, 2]


class _Warnings(logging.Handler):
    """What a rank's log says while this is entered."""

    def __enter__(self) -> list[str]:
        self.said: list[str] = []
        logging.getLogger("dslaunch").addHandler(self)
        return self.said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def __exit__(self, *error: object) -> None:
        logging.getLogger("dslaunch").removeHandler(self)


def _micro_batches(engine: Any, first: int, stop: int) -> None:
    for number in range(first, stop):
        engine.backward(loss_of(engine, batch(number, size=8)[engine.global_rank :: 2]))
        engine.step()


def _load_between(rank: int, folder: str, stage: int, module_only: bool) -> tuple[list[str], list[int]]:
    engine = make(stage, False, gradient_accumulation_steps=3)
    _micro_batches(engine, 0, 3)
    engine.save_checkpoint(folder, f"stage{stage}")
    twin = make(stage, False, gradient_accumulation_steps=3, seed=3)
    twin.load_checkpoint(folder, f"stage{stage}")
    _micro_batches(engine, 3, 5)
    engine.backward(loss_of(engine, batch(5, size=8)))  # and no step()
    with _Warnings() as said:
        engine.load_checkpoint(folder, f"stage{stage}", load_module_only=module_only)
    assert not engine._optimizer_step.skipped._losses  # a skipped step later is not laid to their losses
    counts = [engine.global_steps, engine.micro_steps]
    for one in (engine, twin):
        _micro_batches(one, 6, 9)
    assert_same_bits(whole_state(engine), whole_state(twin))
    return said, [*counts, engine.global_steps, engine.micro_steps]


@pytest.mark.parametrize(("stage", "module_only"), [(0, True), (2, False), (3, False)])
def test_gradients_of_before_a_load_are_dropped_and_told(
    stage: int, module_only: bool, ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(_load_between, str(tmp_path), stage, module_only, world_size=2)
    warning = (
        "load_checkpoint() after 3 of 3 micro batches of step 2: their gradients, which are of the "
        "state before, are dropped on all ranks, and the next micro batch begins a step; load after a "
        "step's last micro batch"
    )
    assert first == ([warning], [1, 3, 2, 6])
    assert second == ([], [1, 3, 2, 6])


def _save_config(rank: int, folder: str) -> tuple[Any, dict[str, Any]]:
    engine = make(2, True, gradient_clipping=1.0, fp16={"enabled": False}, steps_per_print=0)
    engine.set_train_batch_size(24)
    engine.save_checkpoint(folder, "here")
    return engine.settings, torch.load(Path(folder) / "here" / "training.pt", weights_only=True)["config"]


def test_a_checkpoint_holds_the_configuration_in_effect_which_reads_back_the_same(
    ranks: Ranks, tmp_path: Path
) -> None:
    config, saved = ranks(_save_config, str(tmp_path), world_size=2)[0]
    assert config.train_batch_size == 24
    assert config.gradient_accumulation_steps == 2
    assert load_config(saved, world_size=2) == config


def _left_out(rank: int, folder: str) -> tuple[bool, bool, list[str]]:
    engine = make(3, True)
    run(engine, first=0, steps=1)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    names = sorted(CheckpointReader(open_store(folder), "global_step1").tensors())
    fresh = make(1, True, seed=3)
    frozen = snapshot({"weight": fresh.module.frozen.weight})
    fresh.load_checkpoint(folder)
    kept = torch.equal(fresh.module.frozen.weight, frozen["weight"])
    taken = torch.equal(tensors(fresh)["last.weight"], tensors(engine)["last.weight"])
    return kept, taken, [name for name in names if "frozen" in name]


def test_frozen_parameters_may_be_left_out(ranks: Ranks, tmp_path: Path) -> None:
    """A program that loads such a checkpoint has theirs from elsewhere."""
    assert ranks(_left_out, str(tmp_path), world_size=2) == [(True, True, [])] * 2


def _own_load(rank: int, folder: str) -> list[str]:
    engine = make(2, False)
    run(engine, first=0, steps=2)
    engine.save_checkpoint(folder)
    fresh = make(3, False, seed=3)
    seen: list[str] = []

    def load(src: dict[str, Any], dst: nn.Module) -> None:
        seen.extend(sorted(src))
        dst.load_state_dict({**src, "last.bias": src["last.bias"] + 1})

    fresh.load_checkpoint(folder, custom_load_fn=load)
    ours, theirs = tensors(fresh), tensors(engine)
    assert torch.equal(ours.pop("last.bias"), theirs.pop("last.bias") + 1)
    assert_same_bits(ours, theirs)
    moments = [name for name in whole_state(fresh) if "exp_avg" in name]
    assert all(torch.equal(whole_state(fresh)[name], whole_state(engine)[name]) for name in moments)
    assert fresh.global_steps == 2
    return seen


def test_a_function_of_the_user_may_load_the_weights(ranks: Ranks, tmp_path: Path) -> None:
    names = ranks(_own_load, str(tmp_path), world_size=2)[0]
    assert names == sorted(WithCounter().state_dict())


def _tags(rank: int, folder: str) -> list[str]:
    messages = []
    for validation in ("Ignore", "Warn", "Fail"):
        engine = make(0, False, checkpoint={"tag_validation": validation})
        try:
            engine.save_checkpoint(folder, tag=f"{validation}-{rank}")
            messages.append("saved")
        except CheckpointError as error:
            messages.append(str(error))
    with pytest.raises(CheckpointError, match=r"tag '../up' is no name of a folder"):
        engine.save_checkpoint(folder, tag="../up")
    return messages


def test_ranks_that_give_different_tags(ranks: Ranks, tmp_path: Path) -> None:
    text = (
        "save_checkpoint() was given tag 'Fail-0' on rank 0 and 'Fail-1' on rank 1; give all ranks the same "
        "(checkpoint.tag_validation is Fail)"
    )
    assert ranks(_tags, str(tmp_path), world_size=2) == [["saved", "saved", text]] * 2
    assert sorted(path.name for path in tmp_path.glob("*-*")) == ["Ignore-0", "Warn-0"]

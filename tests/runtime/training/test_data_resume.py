"""Data goes on in the middle of an epoch: the batches are those of a run that was never stopped."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

import dslaunch
from dslaunch import ConfigError, RepeatingLoader
from dslaunch.runtime.data.loader import DataPosition, Loader, make_loader
from tests.runtime.models import make_config, make_model
from tests.runtime.ranks import Ranks

Batches = list[list[int]]


class Numbers(Dataset[int]):
    """Its samples are their numbers; it knows which of them this process has read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


def make(length: int = 23, *, rank: int = 0, world_size: int = 2, micro: int = 3, **options: Any) -> Loader:
    return make_loader(Numbers(length), micro_batch_size=micro, rank=rank, world_size=world_size, **options)


def two_epochs(loader: Loader) -> Batches:
    return [batch.tolist() for _ in range(2) for batch in loader]


def stopped_after(count: int, loader: Loader) -> dict[str, int]:
    """The state when `count` batches were handed out, two epochs at most."""
    batches = (batch for _ in range(2) for batch in loader)
    for _ in islice(batches, count):
        pass
    return loader.state_dict()


def rest(loader: Loader, state: dict[str, int]) -> Batches:
    """All batches up to the end of the second epoch."""
    loader.load_state_dict(state)
    batches: Batches = []
    while loader.epoch < 2:
        batches += [batch.tolist() for batch in loader]
    return batches


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "length", [23, 24]
)  # 4 batches of 3 for each of 2 ranks, or 3 where the last is not full
def test_wherever_it_was_stopped_the_same_batches_follow(
    length: int, drop_last: bool, num_workers: int
) -> None:
    options = {"drop_last": drop_last, "num_workers": num_workers}
    whole = two_epochs(make(length, **options))
    stops = range(len(whole) + 1) if num_workers == 0 else (1, len(whole) // 2, len(whole) // 2 + 2)
    for stop in stops:
        state = stopped_after(stop, make(length, **options))
        assert rest(make(length, **options), state) == whole[stop:]


def test_samples_that_were_given_are_not_read_again() -> None:
    state = stopped_after(2, make())
    loader = make()
    batches = rest(loader, state)
    dataset = loader.dataset
    assert isinstance(dataset, Numbers)
    assert dataset.read == [sample for batch in batches for sample in batch]


@pytest.mark.slow
def test_what_workers_have_read_ahead_does_not_count() -> None:
    loader = make(num_workers=2)
    batches = iter(loader)
    next(batches)  # the workers have been given four more
    assert loader.position == DataPosition(epoch=0, num_samples=6)


def global_batches(length: int, world_size: int, micro: int, state: dict[str, int] | None = None) -> Batches:
    """The samples of each step over all ranks, in any order, up to the end of the first epoch."""
    ranks = []
    for rank in range(world_size):
        loader = make(length, rank=rank, world_size=world_size, micro=micro)
        if state is not None:
            loader.load_state_dict(state)
        ranks.append([batch.tolist() for batch in loader])
    return [sorted(sample for part in parts for sample in part) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("world_size", "micro"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_another_number_of_ranks_goes_on_with_the_same_global_batches(world_size: int, micro: int) -> None:
    state = stopped_after(2, make(24, world_size=2, micro=3))
    whole = global_batches(24, 2, 3)
    assert global_batches(24, world_size, micro, state) == whole[2:]


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_a_position_that_does_not_divide_leaves_out_no_sample(world_size: int) -> None:
    """After 9 samples of 23; at most one more than 14 for each of the others to be equally long."""
    state = stopped_after(1, make(23, world_size=3, micro=3))
    assert state["num_samples"] == 9
    given = {sample for batch in global_batches(23, 3, 3)[:1] for sample in batch}
    left = [sample for batch in global_batches(23, world_size, 2, state) for sample in batch]
    assert set(left) >= set(range(23)) - given
    assert len(left) == -(-14 // world_size) * world_size


@pytest.mark.parametrize(("length", "world_size"), [(24, 1), (23, 2), (7, 4), (1, 3), (2, 5)])
def test_parts_are_those_of_torchs_distributed_sampler(length: int, world_size: int) -> None:
    for rank in range(world_size):
        theirs = DistributedSampler(Numbers(length), num_replicas=world_size, rank=rank)
        loader = make(length, rank=rank, world_size=world_size)
        for epoch in range(2):
            theirs.set_epoch(epoch)
            assert [sample for batch in loader for sample in batch.tolist()] == list(theirs)


def test_the_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    loader = make(24)
    assert len(list(loader)) == 4
    assert loader.position == DataPosition(epoch=1)
    none_left = make(4, drop_last=True)
    assert list(none_left) == []
    assert none_left.position == DataPosition(epoch=1)


def test_a_position_set_in_the_middle_of_an_iteration_ends_it() -> None:
    loader, whole = make(), two_epochs(make())
    seen: Batches = []
    state = None
    for _ in range(4):
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == 2:
                state = loader.state_dict()
            if len(seen) == 6 and state is not None:
                loader.load_state_dict(state)
    assert seen == whole[:6] + whole[2:]


def test_other_data_begins_its_epoch_anew(caplog: pytest.LogCaptureFixture) -> None:
    state = stopped_after(6, make(23))
    loader = make(30)
    loader.load_state_dict(state)
    assert loader.position == DataPosition(epoch=1)
    assert caplog.messages == [
        "the checkpoint's training data had 23 samples and this run's has 30: epoch 1 begins anew"
    ]


class Drawn(Numbers):
    """A random number for each sample, as an augmentation draws it."""

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 30, ()))


@pytest.mark.slow
def test_workers_draw_the_same_random_numbers_in_an_epoch_that_is_done_again() -> None:
    def make_drawn() -> Loader:
        return make_loader(Drawn(8), micro_batch_size=2, rank=0, world_size=1, num_workers=1)

    first, again = make_drawn(), make_drawn()
    epochs = [[batch.tolist() for batch in first] for _ in range(2)]
    again.epoch = 1
    assert [batch.tolist() for batch in again] == epochs[1]
    assert epochs[0] != epochs[1]


# ---- RepeatingLoader


def test_a_repeating_loader_goes_from_epoch_to_epoch() -> None:
    repeating = RepeatingLoader(make())
    whole = two_epochs(make())
    assert [next(repeating).tolist() for _ in whole] == whole
    assert iter(repeating) is repeating
    assert list(RepeatingLoader([])) == []


def test_a_repeating_loader_goes_on_where_its_loader_was_set() -> None:
    whole = two_epochs(make())
    state = stopped_after(5, make())
    loader = make()
    repeating = RepeatingLoader(loader)
    loader.load_state_dict(state)
    assert next(repeating).tolist() == whole[5]
    loader.load_state_dict(state)
    assert next(repeating).tolist() == whole[5]


# ---- engine.deepspeed_io()


def allow_children() -> None:
    """Let a rank of the tests, which is a daemon, start workers; they end with their iteration."""
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)  # as in a program


def _io(rank: int) -> dict[str, Any]:
    config = make_config(gradient_accumulation_steps=2, dataloader_drop_last=True)
    engine, _, none, _ = dslaunch.initialize(model=make_model(), config=config, collate_fn=tuple)
    assert none is None
    data = Numbers(11)
    train = engine.deepspeed_io(data)
    own = engine.deepspeed_io(data, batch_size=2, data_sampler=SequentialSampler(data), collate_fn=list)
    allow_children()
    workers = engine.deepspeed_io(data, 4, "eval", num_local_io_workers=1)
    messages = []
    for arguments in ({"route": "test"}, {"dataset": Endless(), "route": "predict"}):
        with pytest.raises(ConfigError) as caught:
            engine.deepspeed_io(**{"dataset": data, **arguments})
        messages.append(str(caught.value))
    assert isinstance(train, Loader)
    assert (type(own), workers.num_workers, train.num_workers) == (DataLoader, 1, 0)
    return {
        "train": list(train),
        "own": list(own),
        "eval": list(workers),
        "predict": list(engine.deepspeed_io(data, 4, "predict")),
        "messages": messages,
    }


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.slow
def test_deepspeed_io_shuffles_to_train_and_keeps_the_order_to_evaluate(ranks: Ranks) -> None:
    for rank, seen in enumerate(ranks(_io, world_size=2)):
        parts = [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 0]]
        assert seen["train"] == [tuple(batch) for batch in make(11, rank=rank).__iter__() if len(batch) == 3]
        assert seen["own"] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        assert seen["eval"] == seen["predict"] == [tuple(parts[rank][:4])]
        route, length = seen["messages"]
        assert route == "deepspeed_io(route='test'): there are 'train', 'eval', 'predict'"
        assert length.startswith("training_data of type Endless has no length")


# ---- checkpoints


class Rows(Dataset[torch.Tensor]):
    """Row n is n seven times."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((7,), float(index))


def _steps(
    rank: int, folder: str, num_workers: int, load: bool, steps: int, save_at: int
) -> tuple[Batches, dict[str, Any], int]:
    """Train for so many steps of two micro batches; return what each micro batch had."""
    config = make_config(gradient_accumulation_steps=2)
    engine, *_ = dslaunch.initialize(model=make_model(), config=config)
    allow_children()
    engine.training_dataloader = engine.deepspeed_io(Rows(), num_local_io_workers=num_workers)
    batches = RepeatingLoader(engine.training_dataloader)
    if load:
        engine.load_checkpoint(folder)
    seen = []
    while engine.global_steps < steps:
        rows = next(batches)
        seen.append([int(row[0]) for row in rows])
        engine.backward(engine(rows).pow(2).mean())
        engine.step()
        if engine.global_steps == save_at and engine.is_gradient_accumulation_boundary() is False:
            engine.save_checkpoint(folder)
            save_at = -1
    return seen, engine.training_dataloader.state_dict(), engine.global_steps


def _together(parts: list[Batches]) -> Batches:
    return [sorted(sample for part in micro for sample in part) for micro in zip(*parts, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("reads", "num_workers"), [(2, 2), (2, 0), (1, 0)])
def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_with_the_next_batch(
    ranks: Ranks, tmp_path: Path, reads: int, num_workers: int
) -> None:
    """Nine steps of 12 samples are two epochs of 50 and a bit.

    Saved in the second one, read by as many ranks, or by one.
    """
    arguments = (str(tmp_path), num_workers)
    whole = ranks(_steps, *arguments, False, 9, 6, world_size=2)
    later = ranks(_steps, *arguments, True, 9, -1, world_size=reads)
    batches = [seen for seen, _, _ in whole]
    again = [seen for seen, _, _ in later]
    num_before = 12  # micro batches in six steps
    if reads == 2:
        assert again == [seen[num_before:] for seen in batches]
    else:
        assert _together(again)[:3] == _together(batches)[num_before : num_before + 3]
    assert later[0][1] == whole[0][1]


def _module_only(rank: int, folder: str) -> tuple[DataPosition, DataPosition]:
    def make_engine() -> dslaunch.Engine:
        engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(), training_data=Rows())
        return engine

    engine, fresh, bare = (
        make_engine(),
        make_engine(),
        dslaunch.initialize(model=make_model(), config=make_config())[0],
    )
    next(iter(engine.training_dataloader))
    engine.save_checkpoint(folder)
    bare.load_checkpoint(folder)  # has nothing to set
    fresh.load_checkpoint(folder, load_module_only=True)
    before = fresh.training_dataloader.position
    fresh.load_checkpoint(folder)
    bare.save_checkpoint(folder, tag="bare")
    fresh.load_checkpoint(folder, tag="bare")
    return before, fresh.training_dataloader.position


def test_the_weights_alone_bring_no_position(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_module_only, str(tmp_path), world_size=1)[0] == (
        DataPosition(),
        DataPosition(epoch=0, num_samples=12),
    )

"""What each rank gets to see of a dataset, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from dslaunch.runtime.data.loader import Loader, make_loader
from dslaunch.runtime.errors import ConfigError


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Seeds(Numbers):
    """Each sample is the seed of the process that reads it."""

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def epoch_of(loader: Loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def samples(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize(
    ("length", "micro", "world_size", "drop_last", "sizes"),
    [
        (12, 2, 2, False, [2, 2, 2]),
        (12, 4, 2, False, [4, 2]),
        (12, 4, 2, True, [4]),
        (7, 2, 2, False, [2, 2]),  # a part of 4 for each: one sample is seen twice
        (1, 2, 3, False, [1]),  # every rank sees the one sample
        (3, 4, 1, True, []),
    ],
)
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_rank_gets_equally_many_batches_and_no_sample_is_left_out(
    length: int, micro: int, world_size: int, drop_last: bool, sizes: list[int], num_workers: int
) -> None:
    seen: set[int] = set()
    for rank in range(world_size):
        loader = make_loader(
            Numbers(length),
            micro_batch_size=micro,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            num_workers=num_workers,
        )
        batches = epoch_of(loader)
        assert [len(batch) for batch in batches] == sizes
        assert len(loader) == len(sizes)
        seen.update(samples(batches))
    if not drop_last:
        assert seen == set(range(length))


def make(rank: int = 0, **options: Any) -> Loader:
    return make_loader(Numbers(64), micro_batch_size=4, rank=rank, world_size=2, **options)


def test_each_iteration_is_a_new_epoch_in_a_new_order() -> None:
    loader = make()
    epochs = []
    for epoch in range(3):
        assert loader.epoch == epoch
        epochs.append(samples(epoch_of(loader)))
    assert len({tuple(order) for order in epochs}) == 3
    other = make(rank=1)
    for mine in epochs:
        assert sorted(mine + samples(epoch_of(other))) == list(range(64))


def test_the_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    assert epoch_of(make()) == epoch_of(make())
    assert epoch_of(make(seed=1)) != epoch_of(make())
    first, second = make(), make()
    epoch_of(first)
    second.epoch = 1
    assert epoch_of(first) == epoch_of(second)
    assert second.epoch == 2


def test_two_iterations_side_by_side_are_two_epochs() -> None:
    loader, one_by_one = make(), make()
    first, second = iter(loader), iter(loader)
    both = [(a.tolist(), b.tolist()) for a, b in zip(first, second, strict=True)]
    assert [a for a, _ in both] == epoch_of(one_by_one)
    assert [b for _, b in both] == epoch_of(one_by_one)


def test_reading_data_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    epoch_of(make())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_workers_of_different_ranks_have_different_seeds_and_the_same_each_run() -> None:
    def seeds(rank: int) -> set[int]:
        loader = make_loader(Seeds(4), micro_batch_size=1, rank=rank, world_size=2, num_workers=1)
        return set(samples(epoch_of(loader)))

    assert seeds(0) == seeds(0)
    assert not seeds(0) & seeds(1)


def test_samples_are_put_together_by_collate_fn() -> None:
    loader = make(collate_fn=tuple)
    assert all(isinstance(batch, tuple) and len(batch) == 4 for batch in loader)


def test_a_loader_is_a_data_loader_of_torch() -> None:
    loader = make()
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert loader.batch_size == 4


NO_LENGTH = (
    "has no length, so it cannot be divided between ranks; "
    "divide it yourself and pass batches to the engine from your own DataLoader"
)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Endless(), f"training_data of type Endless {NO_LENGTH}"),
        (Unsized(), f"training_data of type Unsized {NO_LENGTH}"),
        (Numbers(0), "training_data is empty; it must have at least one sample"),
    ],
)
def test_data_that_cannot_be_divided_is_refused(dataset: Dataset[int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_loader(dataset, micro_batch_size=1, rank=0, world_size=2)
    assert str(caught.value) == message

"""The data loader that initialize() makes of training_data: each rank its own part, shuffled anew each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from .errors import ConfigError

T = TypeVar("T")


class EpochSampler(DistributedSampler[T]):
    """A DistributedSampler whose every iteration is the next epoch, without a call of set_epoch().

    State: `epoch` is the one that the next iteration will be.
    """

    def __iter__(self) -> Iterator[T]:
        order = super().__iter__()  # a finished list: the number may move on before the first index is taken
        self.epoch += 1
        return order


class Loader(DataLoader[Any]):
    """A DataLoader over one rank's part of a dataset, in a new order each epoch."""

    def __init__(self, dataset: Dataset[Any], *, sampler: EpochSampler[Any], **options: Any) -> None:
        super().__init__(dataset, sampler=sampler, **options)
        self._epoch_sampler = sampler

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will be, from 0; set it to go on where a run was stopped."""
        return self._epoch_sampler.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch_sampler.set_epoch(epoch)


def _length(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"training_data of type {type(dataset).__name__} has no length, so it cannot be divided between ranks; "
            "divide it yourself and pass batches to the engine from your own DataLoader"
        )
    return len(dataset)


def make_loader(
    dataset: Dataset[Any],
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    seed: int = 0,
) -> Loader:
    """Micro batches of rank `rank`'s part of `dataset`; every rank gets equally many.

    Parts are made equal by repeating a few samples. `drop_last` leaves out a last micro batch that is not full.
    The order depends on `seed` and the epoch alone, never on torch's global generator.
    Errors: ConfigError if `dataset` has no length or is empty.
    Source: DeepSpeed 0.19.6 runtime/dataloader.py, `DeepSpeedDataLoader`; the same parts.
    """
    if _length(dataset) == 0:
        raise ConfigError("training_data is empty; it must have at least one sample")
    sampler = EpochSampler[Any](dataset, num_replicas=world_size, rank=rank, seed=seed)
    return Loader(
        dataset,
        sampler=sampler,
        batch_size=micro_batch_size,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(seed + rank),  # for the seeds of the workers
    )

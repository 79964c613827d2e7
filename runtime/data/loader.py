"""Data loaders: each rank gets its own part, shuffled anew in each epoch; a run can continue inside an epoch.

The position in an epoch is the number of samples that all ranks together were given, so any number of ranks
can continue from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from ..errors import ConfigError

T = TypeVar("T")

ROUTES = ("train", "eval", "predict")

_log = logging.getLogger("dslaunch")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """A position in the data: in `epoch`, `num_samples` samples were given to all ranks together."""

    epoch: int = 0
    num_samples: int = 0


class EpochSampler(DistributedSampler[T]):
    """A DistributedSampler in which each iteration is the next epoch, without a call of set_epoch().

    State: `begin` is where the next iteration begins; later ones begin at the start of an epoch.
    """

    begin = DataPosition()

    def __iter__(self) -> Iterator[Any]:
        """Return this rank's indices: every world_size-th of the rest of the epoch, to which as few indices
        as needed are added again so that all ranks get equally many.
        """
        order = list(range(self._length))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.begin.epoch)
            order = torch.randperm(self._length, generator=generator, device="cpu").tolist()
        left = order[self.begin.num_samples :]
        left += islice(cycle(order), -len(left) % self.num_replicas)
        self.set_epoch(self.begin.epoch + 1)
        return iter(left[self.rank :: self.num_replicas])

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be the whole epoch of this number."""
        super().set_epoch(epoch)
        self.begin = DataPosition(epoch=epoch)

    @property
    def num_left(self) -> int:
        """Number of samples in this rank's next iteration."""
        return -(-(self._length - self.begin.num_samples) // self.num_replicas)

    @property
    def _length(self) -> int:
        return _length(self.dataset)


class Loader(DataLoader[Any]):
    """A DataLoader over one rank's part of a dataset, in a new order each epoch; `len()` is the number of
    batches in a whole epoch.

    State: `position` follows the last batch that was handed out, however far workers have read ahead. If it
    is set, the next iteration begins there, and an iteration under way ends.
    """

    def __init__(self, dataset: Dataset[Any], *, sampler: EpochSampler[Any], **options: Any) -> None:
        super().__init__(dataset, sampler=sampler, generator=torch.Generator(), **options)
        self._epoch_sampler = sampler
        self._position = sampler.begin
        self._num_moves = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the rest of the epoch's batches; unless the position is set, the next iteration is the next
        epoch.
        """
        sampler, size = self._epoch_sampler, self.batch_size or 1
        begin, after = sampler.begin, DataPosition(epoch=sampler.begin.epoch + 1)
        num_batches = sampler.num_left // size if self.drop_last else -(-sampler.num_left // size)
        if num_batches < 1:
            self._position = after
        # Seeds of workers: different for each rank and epoch, and the same in every run.
        self.generator.manual_seed(sampler.seed + begin.epoch * sampler.num_replicas + sampler.rank)
        num_moves = self._num_moves
        with torch.device("cpu"):  # otherwise torch would draw a number on the program's default device
            batches = super().__iter__()
        for count, batch in enumerate(batches, start=1):
            given = begin.num_samples + count * size * sampler.num_replicas
            is_last = count == num_batches
            self._position = after if is_last else DataPosition(epoch=begin.epoch, num_samples=given)
            yield batch
            if self._num_moves != num_moves:
                return

    @property
    def position(self) -> DataPosition:
        return self._position

    @position.setter
    def position(self, position: DataPosition) -> None:
        self._epoch_sampler.set_epoch(position.epoch)
        self._epoch_sampler.begin = self._position = position
        self._num_moves += 1

    @property
    def epoch(self) -> int:
        """Number of the next iteration's epoch, from 0; set it to begin another epoch."""
        return self._epoch_sampler.begin.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.position = DataPosition(epoch=epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position, which is the same on all ranks, and the number of samples in
        the dataset.
        """
        return {**asdict(self._position), "length": _length(self.dataset)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the last batch that was handed out, without reading the samples before.

        If micro batch size times number of ranks is unchanged, the next batches are those that the saved run
        would have had; else the remaining samples follow in the same order, in batches of the new size.
        Random numbers of workers begin anew. If the number of samples has changed, their order has, too, and
        the epoch begins anew.
        """
        position = DataPosition(epoch=state["epoch"], num_samples=state["num_samples"])
        length = _length(self.dataset)
        if state["length"] != length:
            position = DataPosition(epoch=state["epoch"])
            if self._epoch_sampler.rank == 0:
                _log.warning(
                    "the checkpoint's training data had %d samples and this run's has %d: "
                    "epoch %d begins anew",
                    state["length"],
                    length,
                    position.epoch,
                )
        self.position = position


class RepeatingLoader(Generic[T]):
    """The batches of a loader, repeated without end.

    Source: DeepSpeed 0.19.8 runtime/dataloader.py, `RepeatingLoader`, which begins the iteration at
    construction, before a checkpoint is loaded
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._batches: Iterator[T] = iter(())

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        for batch in self._batches:
            return batch
        self._batches = iter(self.loader)
        return next(self._batches)


def _length(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"training_data of type {type(dataset).__name__} has no length, so it cannot be divided between "
            "ranks; divide it yourself and pass batches to the engine from your own DataLoader"
        )
    return len(dataset)


def make_loader(
    dataset: Dataset[Any],
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    pin_memory: bool = True,
    seed: int = 0,
    shuffle: bool = True,
    **options: Any,
) -> Loader:
    """Return a loader of micro batches of rank `rank`'s part of `dataset`; all ranks get equally many.

    Parts are made equal by repeating a few samples. The order depends on `seed` and the epoch alone, never on
    torch's global generator; without `shuffle` it is the dataset's. `options` are DataLoader's: collate_fn,
    drop_last, num_workers. `pin_memory` needs a GPU, else it is off.
    Errors: ConfigError if `dataset` has no length or is empty.
    Source: DeepSpeed 0.19.6 runtime/dataloader.py, `DeepSpeedDataLoader`; the same parts.
    """
    if _length(dataset) == 0:
        raise ConfigError("training_data is empty; it must have at least one sample")
    # torch's pinned memory, though it rounds up to a power of two: a program copies batches by itself with
    # non_blocking=True, and only torch's allocator keeps their memory until such a copy is done.
    return Loader(
        dataset,
        sampler=EpochSampler[Any](dataset, num_replicas=world_size, rank=rank, seed=seed, shuffle=shuffle),
        batch_size=micro_batch_size,
        pin_memory=pin_memory and torch.cuda.is_available(),
        **options,
    )


def load_data(
    dataset: Dataset[Any],
    *,
    route: str,
    sampler: Sampler[Any] | None,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    pin_memory: bool,
    shuffle: bool = True,
    **options: Any,
) -> DataLoader[Any]:
    """Return a `Loader` for the route train; for eval and predict a loader that gives each rank its part in
    the dataset's order.

    If the user gives a sampler, every route returns a plain DataLoader with that sampler.
    Errors: ConfigError for another route; otherwise as `make_loader`
    """
    if route not in ROUTES:
        raise ConfigError(f"deepspeed_io(route={route!r}): there are {', '.join(map(repr, ROUTES))}")
    if sampler is None and route == "train":
        return make_loader(
            dataset,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            pin_memory=pin_memory,
            shuffle=shuffle,
            **options,
        )
    if sampler is None:
        _length(dataset)
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False)
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=micro_batch_size,
        pin_memory=pin_memory and torch.cuda.is_available(),
        **options,
    )

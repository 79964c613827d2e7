"""Gradients of which each rank keeps a shard in a file, from the moment the ranks have averaged
it until it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....kernels import squared_norm
from ...offload.device_copies import Arrival
from ...offload.outbox import Outbox
from ...offload.spill import Spill
from ..parameters.flat_buffer import FlatBuffer
from .sharded_gradients import ShardedGradients, SumPlace


class DiskPlace(NamedTuple):
    """File and layout of a sub-buffer's gradients, and the runs of them that count in the norm."""

    make_spill: Callable[[Callable[[], Mapping[str, Tensor]]], Spill]
    outbox: Outbox
    norm_runs: tuple[tuple[int, int], ...]  # start and end of each piece of the norm in the shard


class DiskGradients(ShardedGradients):
    """Sharded gradients as in HostGradients, with the shard in a file.

    One micro batch
    ---------------
    The shard lands in host memory; the file's sum of earlier micro batches has been read meanwhile and is
    added. The squares are summed while all is there: only the last sum of them is the norm's, and it is not
    known before which is the last. The sum is written, and its memory is given back when it must be, see
    `Outbox`. A first micro batch is written in the dtype in which it was sent, a sum in the dtype of sums, to
    a file of its own.
    """

    is_on_host = True

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        whole: FlatBuffer,
        *,
        sums: SumPlace,
        index: int,
        num_shards: int,
        place: DiskPlace,
    ) -> None:
        """Errors: OffloadError if there is no space for a micro batch"""
        super().__init__(names, params, whole, sums=sums, index=index, num_shards=num_shards)
        self._value: dict[str, Tensor] = {}  # {dtype: [shard]}, empty if it is zero
        self._spill, self._outbox = place.make_spill(lambda: self._value), place.outbox
        self._norm_runs = place.norm_runs
        self._squares = (0.0,) * len(self._norm_runs)  # sums of squares of the runs
        self._landed: Tensor | None = None  # [shard] of this micro batch, of the dtype that was sent
        self._arrival: Arrival | None = None  # set while the shard is on its way
        self._is_leaving = False  # True while the memory is kept until it is written
        self._is_wanted = False  # True while a reader has or awaits the memory
        self._numel = self._stop - self._start
        self._spill.reserve(_name(whole.flat.dtype), self._numel * whole.flat.dtype.itemsize)

    def _make_shard(self) -> Tensor:
        return torch.zeros(0, dtype=self._sums.dtype, device="cpu")

    @property
    def shard(self) -> Tensor:
        """[shard] A copy."""
        with self._here() as value:
            if value is None:
                return torch.zeros(self._numel, dtype=self._sums.dtype, device="cpu")
            return value.to(self._sums.dtype, copy=True)

    def squares(self) -> Sequence[float]:
        self.go_on()
        return self._squares

    # ---- a micro batch

    def complete(self) -> None:
        super().complete()
        self._read_ahead()

    def keep(self) -> None:
        self._outbox.make_room()
        self._was_zero = self._is_zero
        own = self.flat[self._start : self._stop]
        self._landed = self._spill.take_memory(own.shape, own.dtype)
        self._arrival = Arrival(own, self._landed, then=self._whole.free)
        self._hand_over()
        self._is_leaving = True
        self._outbox.enter(self)
        if self._arrival.is_done and (self._is_zero or self._spill.is_ready):
            self.go_on()

    def go_on(self) -> None:
        landed, arrival = self._landed, self._arrival
        if landed is None or arrival is None:
            return
        self._landed = self._arrival = None
        arrival.wait()
        if self._is_zero:
            value = landed
        else:
            self._spill.finish_in()
            value = self._widened()
            value.add_(landed)
            self._spill.give_memory(landed)
        self._is_wanted = False
        self._write(value)

    def settle(self) -> None:
        if self._is_leaving:
            self.go_on()
            self._is_leaving = False
            self._spill.finish_out()

    def _begin(self) -> None:
        if not self._is_allocated and self._arrival is not None:
            self.go_on()  # the flat buffer is still being copied from
        super()._begin()

    def forget(self) -> None:
        super().forget()
        if not self._is_leaving:
            self.let_go()

    # ---- what is in the file

    def start_in(self) -> None:
        self._read_ahead()
        # Requests are served in the order in which they were made: what is still written has come before.
        self._outbox.flush()

    def _read_ahead(self) -> None:
        if self._is_zero or self._is_wanted:
            return
        self._is_wanted = True
        if self._is_leaving:
            self._outbox.leave(self)
            self.go_on()
            self._is_leaving, self._is_wanted = False, True
        else:
            self._spill.start_in()

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        self.start_in()
        yield start, self._arrived_value()[start:stop]

    def let_go(self) -> None:
        if self._is_wanted:
            self._is_wanted = False
            self._spill.finish_out()

    @contextmanager
    def _here(self) -> Iterator[Tensor | None]:
        """[shard] The value; None if it is zero."""
        self._check_here()
        self.start_in()
        try:
            yield None if self._is_zero else self._arrived_value()
        finally:
            self.let_go()

    def _arrived_value(self) -> Tensor:
        if self._is_zero:
            return torch.zeros(self._numel, dtype=self._sums.dtype, device="cpu")
        self._spill.finish_in()
        (value,) = self._value.values()
        return value

    def _widened(self) -> Tensor:
        """The value, which is here, in the dtype of sums."""
        (value,) = self._value.values()
        if value.dtype == self._sums.dtype:
            return value
        wide = self._wide_memory().copy_(value)
        self._spill.give_memory(value)
        return wide

    def _wide_memory(self) -> Tensor:
        """[shard] Memory for a sum, when there is a file for it."""
        self._spill.reserve(_name(self._sums.dtype), self._numel * self._sums.dtype.itemsize)
        return self._spill.take_memory(torch.Size([self._numel]), self._sums.dtype)

    def _write(self, value: Tensor) -> None:
        """Replace the value, and begin to write it."""
        self._value = {_name(value.dtype): value}
        self._is_zero = False
        self._squares = tuple(squared_norm([value[start:stop]]) for start, stop in self._norm_runs)
        self._spill.start_out()

    # ---- from outside

    def replace_own(self, index: int, value: Tensor) -> None:
        with self._here() as known:
            wide = self._wide_memory().zero_() if known is None else self._widened()
            slot = self._whole.layout.slots[index]
            start = max(slot.offset, self._start) - self._start
            wide[start : start + value.numel()].copy_(value.reshape(-1))
            self._is_wanted = True
            self._write(wide)

    def take_off(self) -> Sequence[Tensor]:
        self._outbox.flush()
        self._is_here = False
        return ()  # no part of it is on the device

    def zero(self) -> None:
        self._outbox.leave(self)
        self.settle()
        super().zero()
        self.let_go()
        self._value = {}
        self._squares = (0.0,) * len(self._norm_runs)

    def release(self) -> None:
        self.zero()
        super().release()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

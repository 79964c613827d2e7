"""Gradients of which each rank keeps a shard, on the device or in host memory.

They have a flat buffer only while a backward fills it: each parameter's gradient is handed in when autograd
has finished it, and when the ranks have averaged the whole, each keeps its own shard and adds to it from one
micro batch to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...comm.collectives import Collectives
from ...errors import ConfigError
from ...offload.device_copies import Arrival
from ...offload.pinned_memory import host_empty, host_zeros
from ..parameters.flat_buffer import FlatBuffer
from .gradients import FlatGradients, HostSums

# [Note: small gradients are copied together]
# On a GPU a copy of a few kilobytes takes as long as its launch, and a unit has many of them: biases, norms,
# adapters. So small gradients wait for each other, and one launch copies them when the unit is complete.
# Large gradients go at once, since autograd's memory is free for the next layer then. The waiting ones
# take no more than _WAITING_BYTES, whatever the size of a unit.
_SMALL_BYTES = 2**20
_WAITING_BYTES = 2**24


class SumPlace(NamedTuple):
    """Device, dtype and memory of the sum of a shard of gradients."""

    dtype: torch.dtype
    device: torch.device
    pin_memory: bool


class ShardedGradients(FlatGradients):
    """`p.grad` is None outside a backward. The shard is float32, unless said otherwise, as it costs 1/N."""

    is_reduced_in_backward = True

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        whole: FlatBuffer,
        *,
        sums: SumPlace,
        index: int,
        num_shards: int,
    ) -> None:
        super().__init__(names, params, whole)
        self._start, self._stop = whole.layout.shard_range(index, num_shards=num_shards)
        self._sums = sums
        self._lock = RLock()
        self._shard = self._make_shard()
        self._is_zero = True
        self._was_zero = True  # True if the sum was zero before the last average was added
        self._is_allocated = False
        # place -> gradient: see [Note: small gradients are copied together]
        self._waiting: dict[int, Tensor] = {}
        self._waiting_bytes = 0
        self._gaps = whole.layout.gaps()
        whole.free()

    def _make_shard(self) -> Tensor:
        where = self._sums
        numel = self._stop - self._start
        if where.device.type == "cpu":
            return host_zeros((numel,), where.dtype, pin_memory=where.pin_memory)
        return torch.zeros(numel, dtype=where.dtype, device=where.device)

    @property
    def shard(self) -> Tensor:
        return self._shard

    def held(self) -> tuple[Tensor, ...]:
        return (*super().held(), *self._waiting.values(), self._shard)

    def averages(self, indices: Sequence[int], comm: Collectives) -> list[Tensor]:
        whole = comm.gather_states(self.shard.to(self.flat.device), what=self._label(indices[0]))
        return [self._cut(whole, index) for index in indices]

    def replace(self, index: int, value: Tensor) -> None:
        slot = self._whole.layout.slots[index]
        start, stop = max(slot.offset, self._start), min(slot.offset + slot.numel, self._stop)
        if start < stop:
            self.replace_own(index, value.reshape(-1)[start - slot.offset : stop - slot.offset])

    def replace_own(self, index: int, value: Tensor) -> None:
        slot = self._whole.layout.slots[index]
        start = max(slot.offset, self._start) - self._start
        self.shard[start : start + value.numel()].copy_(value.reshape(-1))
        self._is_zero = False

    def take_off(self) -> Sequence[Tensor]:
        self._is_here = False
        return (self.shard,)

    def put_on(self) -> None:
        self._is_here = True

    @property
    def is_late(self) -> bool:
        """True if there are gradients that the ranks have not averaged."""
        return self._is_allocated

    def hand_in(self, index: int) -> None:
        """Autograd has finished the gradient of the parameter at `index`;
        reentrant checkpointing does so twice.
        """
        if torch.is_grad_enabled():  # a backward that makes a graph
            with torch.no_grad():
                self.hand_in(index)
            return
        if not self._is_allocated:
            self._begin()
        param, view = self._params[index], self._whole.views[index]
        with torch._C.DisableTorchFunctionSubclass():  # freed parameters would ask Python
            grad = param.grad
            if grad is None:
                grad = torch.zeros((), dtype=view.dtype, device=view.device)
            elif grad.is_sparse:
                grad = grad.to_dense()
            if index in self._arrived:
                self._copy_waiting()
                view.add_(grad)
            elif not (grad.is_cuda and grad.shape == view.shape and self._may_wait(index, grad)):
                view.copy_(grad)
            self._arrived.add(index)
            param.grad = None
        if self._waiting and self.is_complete:
            self._copy_waiting()

    def _may_wait(self, index: int, grad: Tensor) -> bool:
        """Keep a small gradient to be copied with others; return whether it is small."""
        num_bytes = _memory(grad)
        if num_bytes > _SMALL_BYTES:
            return False
        if self._waiting_bytes + num_bytes > _WAITING_BYTES:
            self._copy_waiting()
        self._waiting[index] = grad
        self._waiting_bytes += num_bytes
        return True

    def _copy_waiting(self) -> None:
        """Copy the waiting gradients into the flat buffer, in one launch."""
        if self._waiting:
            views = [self._whole.views[index] for index in self._waiting]
            torch._foreach_copy_(views, list(self._waiting.values()))
            self._drop_waiting()

    def _drop_waiting(self) -> None:
        self._waiting, self._waiting_bytes = {}, 0

    @torch.no_grad()
    def complete(self) -> None:
        """Set the gradients that were not handed in to zero."""
        self._begin()
        self._copy_waiting()
        for index, view in enumerate(self._whole.views):
            if index not in self._arrived:
                view.zero_()
        self.look_at_own()

    def _begin(self) -> None:
        """Have a flat buffer, of which nothing is zeroed that is overwritten anyway."""
        self._check_here()
        if not self._is_allocated:
            self._is_allocated = True
            self._whole.allocate()
            for start, stop in self._gaps:
                self.flat[start:stop].zero_()

    def forget(self) -> None:
        """Drop the gradients that were handed in, since a backward failed."""
        self._drop_waiting()
        self._arrived.clear()
        if self._is_allocated:
            self._is_allocated = False
            self._whole.free()

    def _hand_over(self) -> None:
        """Leave the flat buffer to the copy that is under way, which frees it."""
        self._arrived.clear()
        self._is_allocated = False

    def adopt(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # freed parameters would ask Python
            grads = [param.grad for param in self._params]
        for name, grad in zip(self._names, grads, strict=True):
            if grad is not None:
                raise ConfigError(
                    f"parameter '{name}' was given a gradient by hand, but this ZeRO stage shards gradients: "
                    "they are what backward adds up, and p.grad is None outside it; let the loss say it, or "
                    "use stage 0 or 1"
                )

    def keep(self) -> None:
        own = self.flat[self._start : self._stop]
        self._was_zero = self._is_zero
        if self._is_zero:
            self._shard.copy_(own)
        else:
            self._shard.add_(own)
        self._is_zero = False
        self.forget()

    def take_back(self) -> bool:
        """Drop the average that was added last; False if it was added to others."""
        if self._was_zero:
            self.zero()
        return self._was_zero

    def zero(self) -> None:
        self._check_here()
        self.forget()
        with torch._C.DisableTorchFunctionSubclass():
            for param in self._params:
                param.grad = None
        if not self._is_zero:
            self._shard.zero_()
        self._is_zero = True


class _Watch(NamedTuple):
    before_change: Callable[[], None]
    landed: Callable[[], None]


class HostGradients(ShardedGradients):
    """Sharded gradients, each shard of which goes to host memory as soon as the ranks have averaged it.

    A shard stays in the dtype in which it was sent, and is added up in the dtype of sums only when a second
    micro batch comes: an optimizer reads 2 bytes of an element where it would read 4. Other threads may read
    `pieces`, between changes.
    """

    is_on_host = True
    _landed: Tensor | None = None  # [shard] the last one, of the dtype that was sent
    _arrival: Arrival | None = None  # set while the shard is on its way
    _is_single = False  # the landed shard is the sum; else it is still to be added, unless that was done
    _watch: _Watch | None = None

    @property
    def host_sums(self) -> HostSums:
        """Return these gradients."""
        return self

    def watch(self, *, before_change: Callable[[], None], landed: Callable[[], None]) -> None:
        """Have these called from now on: before the sum changes, and when a backward's part of it
        is on its way here.
        """
        self._watch = _Watch(before_change, landed)

    def take(self) -> Tensor:
        """Return the sum, [shard], as the caller's own, and be zero."""
        self._tell_change()
        self._settle()
        if self._is_single and self._landed is not None:
            taken, self._landed = self._landed, None
        else:
            taken, self._shard = self.shard, self._make_shard()
        self._is_single, self._is_zero = False, True
        return taken

    def _tell_change(self) -> None:
        if self._watch is not None:
            self._watch.before_change()

    def _make_shard(self) -> Tensor:
        self._is_single = False
        return torch.zeros(0, dtype=self._sums.dtype, device="cpu")  # no memory until it is needed

    @property
    def shard(self) -> Tensor:
        with self._lock:
            self._settle()
            if self._shard.numel() < self._stop - self._start:
                self._shard = super()._make_shard()
            if self._is_single and self._landed is not None:
                self._shard.copy_(self._landed)
                self._is_single = False
            return self._shard

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        with self._lock:
            self._settle()
            whole = self._landed if self._is_single and self._landed is not None else self.shard
        yield start, whole[start:stop]

    def replace_own(self, index: int, value: Tensor) -> None:
        self._tell_change()
        super().replace_own(index, value)

    def take_off(self) -> Sequence[Tensor]:
        self._tell_change()
        return super().take_off()

    def keep(self) -> None:
        self._tell_change()
        self._settle()
        if not self._is_zero and self._is_single:
            _ = self.shard  # have the sum to add to
        own = self.flat[self._start : self._stop]
        if self._landed is None:
            pinned = self._sums.pin_memory
            self._landed = host_empty(own.shape, own.dtype, pin_memory=pinned)
        self._arrival = Arrival(own, self._landed, then=self._whole.free)
        self._is_single = self._was_zero = self._is_zero
        self._is_zero = False
        self._hand_over()
        if self._watch is not None:
            self._watch.landed()

    def _begin(self) -> None:
        if not self._is_allocated:
            with self._lock:  # another thread may be settling it
                self._settle()  # otherwise the flat buffer would be freed once more
        super()._begin()

    def _settle(self) -> None:
        """Have here what is on its way, and in the sum if it is a part of it."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None and self._landed is not None:
            arrival.wait()
            if not self._is_single:
                self._shard.add_(self._landed)

    def zero(self) -> None:
        self._tell_change()
        self._settle()
        self._is_single = False
        super().zero()


def _memory(tensor: Tensor) -> int:
    """Number of bytes that stay as long as the tensor, which may be a view of more."""
    return tensor.untyped_storage().nbytes()

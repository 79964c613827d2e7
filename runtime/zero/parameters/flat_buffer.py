"""One allocation that follows a `FlatLayout`, and its views with the parameters' shapes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from .layout import FlatLayout


class FlatBuffer:
    """Storage and views. Everything is zero at first, unless the memory is to be given back without a look at
    it, and the padding stays zero for good.

    A residence other than the device that computes will change where `flat` is allocated,
    and nothing else here.
    """

    def __init__(
        self, layout: FlatLayout, *, dtype: torch.dtype, device: torch.device, is_zero: bool = True
    ) -> None:
        self.layout = layout
        # called with the previous `address` when `flat` and `views` are other tensors
        self.on_new_memory: Callable[[int], object] = _nothing
        # Not torch.zeros: a plan gives integers that are made so values, and these get some that it lacks.
        flat = torch.empty(layout.numel, dtype=dtype, device=device)
        self._place(flat.zero_() if is_zero else flat)  # without zeros, no memory is touched

    def _place(self, flat: Tensor) -> None:
        self.flat = flat  # [numel]
        self._nbytes = flat.nbytes
        self.views: tuple[Tensor, ...] = tuple(
            flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self.layout.slots
        )
        self._num_references = num_users(flat)

    @property
    def address(self) -> int:
        """A number for the memory, which tensors that lie in it share, whether it is given back or not."""
        return address_of(self.flat)

    def free(self) -> None:
        """Give the memory back; the views stay, and must not be read before `allocate`."""
        if not self._can_be_resized:
            self._renew()
        self.flat.untyped_storage().resize_(0)

    @property
    def _can_be_resized(self) -> bool:
        """True if a program has had the memory neither as a numpy array nor shared; otherwise the memory is
        left to the program, and ours is new.
        """
        storage = self.flat.untyped_storage()
        return storage.resizable() and not (self.flat.is_cpu and storage.is_shared())

    def _renew(self) -> None:
        was = self.address
        with torch.inference_mode(False):  # a tensor that is made in inference mode refuses every later write
            self._place(torch.empty_like(self.flat))
        self.on_new_memory(was)

    def free_unless_referred_to(self) -> bool:
        """Give the memory back, unless tensors other than ours lie in it; return whether it is gone.

        Autograd and checkpoints of activations may hold some, and to read memory that was given
        back ends the process.
        """
        is_free = num_users(self.flat) <= self._num_references
        if is_free:
            self.free()
        return is_free

    def allocate(self) -> None:
        """Take memory again, whose contents are to be overwritten.

        A tensor of the program's that lies in what could not be given back keeps that memory and its
        values: ours is new then.
        """
        if num_users(self.flat) > self._num_references or not self._can_be_resized:
            self._renew()
        self.flat.untyped_storage().resize_(self._nbytes)

    def shard(self, index: int, *, num_shards: int) -> Tensor:
        """Return the view [numel / num_shards] of one shard."""
        start, stop = self.layout.shard_range(index, num_shards=num_shards)
        return self.flat[start:stop]


def _nothing(address: int) -> None:
    """Ignore the new memory."""


# Return `FlatBuffer.address` of the memory that a tensor lies in. It raises NotImplementedError for a tensor
# that has no storage: a sparse one, one of mkldnn, a wrapper of torch.func.
address_of: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]


def references_to_storage(address: int) -> int:
    """Return the reference count of the `c10::StorageImpl` at this address, which is a storage's `_cdata`.

    Source: torch 2.6 and 2.7, c10/util/intrusive_ptr.h, `intrusive_ptr_target`: a pointer to the virtual
    functions, then `refcount_`, an atomic uint32
    """
    return ctypes.c_uint32.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value


# Builds of torch for CPUs return the count since pull request 155451 of June 2025; before that it is read.
_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", references_to_storage)


def num_users(tensor: Tensor) -> int:
    """Return how many tensors have this one's memory, and a constant."""
    return _use_count(tensor.untyped_storage()._cdata)

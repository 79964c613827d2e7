"""One allocation that follows a `FlatLayout`, and its views with the parameters' shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import FlatLayout


class FlatBuffer:
    """Storage and views. Everything is zero at first, and the padding stays zero for good.

    A residence other than the device that computes will change where `flat` is allocated, and nothing else here.
    """

    def __init__(self, layout: FlatLayout, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.flat = torch.zeros(layout.numel, dtype=dtype, device=device)  # [numel]
        self._nbytes = self.flat.nbytes
        self.views: tuple[Tensor, ...] = tuple(
            self.flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in layout.slots
        )
        self._num_references = num_users(self.flat)

    def free(self) -> None:
        """Give the memory back; the views stay, and must not be read before `allocate`."""
        self.flat.untyped_storage().resize_(0)

    def free_unless_referred_to(self) -> bool:
        """Give the memory back, unless tensors other than ours lie in it; return whether it is gone.

        Autograd and checkpoints of activations may hold some, and whoever reads memory that was given back ends the process.
        """
        is_free = num_users(self.flat) <= self._num_references
        if is_free:
            self.free()
        return is_free

    def allocate(self) -> None:
        """Take memory again; what is in it is to be overwritten."""
        self.flat.untyped_storage().resize_(self._nbytes)

    def shard(self, index: int, *, num_shards: int) -> Tensor:
        """Return the view [numel / num_shards] of one shard."""
        start, stop = self.layout.shard_range(index, num_shards=num_shards)
        return self.flat[start:stop]


def num_users(tensor: Tensor) -> int:
    """Return how many tensors have this one's memory, and a constant."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count

"""Pages of pinned memory that are not there: taken, used again and given back as the offload does."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..offload import pinned_memory
from .memory import KEPT, RunMemory
from .storages import StorageRecord, Storages

_CPU = torch.device("cpu")


class PlannedBlock(pinned_memory._Block):
    """Some pages, which count as memory even while no tensor uses them."""

    def __init__(self, num_bytes: int, pages: PlannedPages) -> None:
        self.num_bytes = num_bytes
        self.address = pages.storages.new_address(num_bytes)
        self.uses = {}
        self.lent = None
        self.free: StorageRecord | None = None
        self._pages = pages

    def unlock(self) -> None:
        """Let it count no more."""
        self._pages.count_no_more(self)


class PlannedPages:
    """All pinned pages of this process."""

    def __init__(self, storages: Storages, memory: RunMemory) -> None:
        self.storages, self._memory = storages, memory

    def put(self) -> None:
        """Use them in place of the system's, in this process."""
        replaced: Any = pinned_memory

        def cut(memory: Any, block: PlannedBlock, num_bytes: int) -> Tensor:
            return self._lend(block, num_bytes, memory._returned)

        replaced._Block = partial(PlannedBlock, pages=self)
        replaced.PinnedMemory._cut = cut

    def _lend(self, block: PlannedBlock, num_bytes: int, returned: Any) -> Tensor:
        """Return a tensor over the block, which is free when its storage ends."""
        self.count_no_more(block)
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        # before that of the storage's record: the last comes first
        weakref.finalize(tensor.untyped_storage(), self._take_back, block, returned).atexit = False
        record = self.storages.add(tensor, _CPU, is_pinned=True, taken_bytes=block.num_bytes)
        record.address = block.address  # copies note by it that they use the block
        return tensor

    def _take_back(self, block: PlannedBlock, returned: Any) -> None:
        returned.append(block)
        block.free = StorageRecord(_CPU, block.num_bytes, 0, is_pinned=True, taken_bytes=block.num_bytes)
        self._memory.born(block.free)
        self._memory.tell(block.free, KEPT)

    def count_no_more(self, block: PlannedBlock) -> None:
        """Note that the block is not free any more."""
        if block.free is not None:
            self._memory.died(block.free)
            block.free = None

"""Page-locked host memory, by the page.

torch's allocator of such memory rounds each request up to a power of two, and the masters, moments and
gradients of a unit are large: a shard of 33 MiB would take 64. Here memory comes from the system and is
page-locked in place. Freed memory is kept for the next request of about its size, since page-locking takes
longer than copying. torch's is_pinned() is true for this memory, too.

[Note: pinned memory that a copy uses]
torch does not know which copies use this memory. So a copy to or from it that the host does not wait for is
an `Arrival` (device_copies.py), which notes its event here. Memory that is freed earlier is reused only when
all events noted for it have happened.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from bisect import bisect_left, insort
from collections import deque
from contextlib import suppress
from threading import Lock
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("dslaunch")
_LOOSE = 9 / 8  # largest ratio of a reused block to the wanted size
_KEPT = 1 / 8  # largest amount of free memory that is kept, as a part of the memory in use,
_KEPT_BYTES = 256 * 2**20  # or so many bytes if that is more


class _Block:
    """Some pages; locked until `unlock`."""

    def __init__(self, num_bytes: int) -> None:
        """Errors: OSError if there is no memory, or if it cannot be locked"""
        self.num_bytes = num_bytes
        self.pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Without this the first write after a fork would give this process another page than the locked one.
        self.pages.madvise(mmap.MADV_DONTFORK)
        self.address = torch.frombuffer(self.pages, dtype=torch.uint8).data_ptr()
        self.uses: dict[int, torch.cuda.Event] = {}  # stream -> the latest copy
        self.lent: weakref.ref[memoryview] | None = None
        error = int(_cudart().cudaHostRegister(self.address, num_bytes, 0))
        if error != 0:
            with suppress(RuntimeError):  # otherwise CUDA would report this error again with the next launch
                torch.zeros(1, device="cuda")
            raise OSError(f"cudaHostRegister of {num_bytes} bytes: error {error}")

    def unlock(self) -> None:
        """Unlock the memory; the system gets the pages back with the last reference."""
        _cudart().cudaHostUnregister(self.address)

    @property
    def is_idle(self) -> bool:
        """True if no copy uses the block."""
        done = [stream for stream, event in self.uses.items() if event.query()]  # type: ignore[no-untyped-call]
        for stream in done:
            del self.uses[stream]
        return not self.uses


class PinnedMemory:
    """Pinned memory of this process; any thread may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._in_use: dict[int, _Block] = {}  # address -> block
        self._free: list[_Block] = []  # the smallest first; a copy may still use one
        # Blocks of tensors that ended, perhaps in a thread that holds the lock: they wait here.
        self._returned: deque[_Block] = deque()
        self._can_lock = True

    @property
    def num_bytes(self) -> int:
        """Number of bytes that are locked."""
        with self._lock:
            self._collect()
            return sum(block.num_bytes for block in (*self._in_use.values(), *self._free))

    def take(self, num_bytes: int) -> Tensor:
        """Return an uninitialized tensor [num_bytes] uint8 with a storage of its own that begins
        at a page.
        """
        if num_bytes >= mmap.PAGESIZE and self._can_lock:
            try:
                return self._cut(self._take(num_bytes), num_bytes)
            except OSError as error:  # the driver or the container cannot lock memory
                self._can_lock = False
                _log.warning("pinned host memory is torch's from now on, up to twice as much: %s", error)
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def note_use(self, tensor: Tensor, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Note that a copy in this stream uses a tensor in host memory until the event; see [Note: pinned
        memory that a copy uses].
        """
        block = self._in_use.get(tensor.untyped_storage().data_ptr())
        if block is not None:
            block.uses[stream.stream_id] = event

    def _take(self, num_bytes: int) -> _Block:
        with self._lock:
            self._collect()
            place, at_most = bisect_left(self._free, num_bytes, key=_size), _LOOSE * num_bytes + mmap.PAGESIZE
            while place < len(self._free) and self._free[place].num_bytes <= at_most:
                if self._free[place].is_idle:
                    return self._use(self._free.pop(place))
                place += 1
            self._give_up()
            return self._use(_Block(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE))

    def _use(self, block: _Block) -> _Block:
        self._in_use[block.address] = block
        return block

    def _cut(self, block: _Block, num_bytes: int) -> Tensor:
        """Return a tensor over the block; when its storage ends, the view of the pages ends and the block is
        free.
        """
        view = memoryview(block.pages)[:num_bytes]
        returned = self._returned
        block.lent = weakref.ref(view, lambda _: returned.append(block))
        return torch.frombuffer(view, dtype=torch.uint8)

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            block.lent = None
            del self._in_use[block.address]
            insort(self._free, block, key=_size)

    def _give_up(self) -> None:
        """Give free memory back to the system if there is more than may be kept."""
        in_use = sum(block.num_bytes for block in self._in_use.values())
        excess = sum(block.num_bytes for block in self._free) - max(_KEPT * in_use, _KEPT_BYTES)
        for block in [block for block in self._free if block.is_idle]:
            if excess <= 0:
                break
            excess -= block.num_bytes
            self._free.remove(block)
            block.unlock()


def host_empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, *, pin_memory: bool) -> Tensor:
    """Return an uninitialized tensor in host memory, page-locked if `pin_memory`."""
    shape = torch.Size(shape)
    if not pin_memory:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return PINNED_MEMORY.take(shape.numel() * dtype.itemsize).view(dtype).view(shape)


def host_zeros(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, *, pin_memory: bool) -> Tensor:
    """Return zeros in host memory, page-locked if `pin_memory`."""
    if not pin_memory:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return host_empty(shape, dtype, pin_memory=True).zero_()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _size(block: _Block) -> int:
    return block.num_bytes


PINNED_MEMORY = PinnedMemory()

"""The folder of one rank on a local disk, and the memory that its files are read into."""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ...kernels.disk import DiskEngine, DiskFile, aligned_empty
from ...kernels.disk_folder import DiskFolder
from ..comm.rank_group import Job
from ..config.offload import AioConfig
from ..errors import ConfigError

# Largest ratio of reused memory to the wanted size; 2 lets gradients of 16 bits use the memory of states
_LOOSE = 2


class SpillFolder:
    """A folder below a user's `nvme_path`, with a name that no other job has.

    It is removed when it is closed, or with the end of the process.

    Order:  construction is a collective
    Errors: ConfigError if there can be no such folder
    """

    def __init__(self, nvme_path: Path, aio: AioConfig, *, key: str, job: Job) -> None:
        """`key` is the section of the ds_config that names the path, for messages."""
        name = job.all_gather_objects(secrets.token_hex(8), what="the name of a folder on NVMe")[0]
        try:
            self._folder = DiskFolder.claim(nvme_path, name, job.index)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}.nvme_path: {error}") from error
        try:
            self._engine = DiskEngine(num_threads=aio.num_threads, block_bytes=aio.block_bytes)
        except (OSError, ValueError) as error:
            raise ConfigError(f"aio: {error}") from error
        self._free: list[Tensor] = []  # memory that is not in use, [nbytes] uint8, the smallest first
        self._num_readers: Counter[int] = Counter()  # address -> how often `keep_memory` was called for it
        # address -> bytes, for all memory that was allocated here and not given back to the system
        self.memory: dict[int, int] = {}

    def create(self, name: str, nbytes: int) -> DiskFile:
        """Make a file.

        Errors: OSError with the bytes wanted and free if the disk is full
        """
        return self._engine.create(self._folder.path / name, nbytes)

    def take_memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor into which files are read without a copy on the way."""
        nbytes = shape.numel() * dtype.itemsize
        place = bisect_left(self._free, nbytes, key=Tensor.numel)
        if place < len(self._free) and self._free[place].numel() <= _LOOSE * nbytes:
            memory = self._free.pop(place)
        else:
            self._drop(nbytes)
            memory = from_dlpack(aligned_empty(nbytes))
            self.memory[memory.data_ptr()] = nbytes
        return memory[:nbytes].view(dtype).view(shape)

    def _drop(self, nbytes: int) -> None:
        """Give blocks of unused memory, smaller than `nbytes` each, back to the system: so many
        bytes in all.
        """
        while (place := bisect_right(self._free, nbytes, key=Tensor.numel)) and nbytes > 0:
            memory = self._free.pop(place - 1)
            del self.memory[memory.data_ptr()]
            nbytes -= memory.numel()

    def keep_memory(self, tensor: Tensor) -> None:
        """Note a further reader of the memory: it is free only after one more `give_memory`."""
        if tensor.data_ptr() in self.memory:
            self._num_readers[tensor.data_ptr()] += 1

    def give_memory(self, tensor: Tensor) -> None:
        """Keep the memory for the next request, if it was allocated here and has no other reader."""
        address = tensor.data_ptr()
        if self._num_readers[address]:
            self._num_readers[address] -= 1
        elif address in self.memory:
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
            insort(self._free, whole, key=Tensor.numel)

    def close(self) -> None:
        """Remove the folder."""
        self._engine.close()
        self._folder.close()

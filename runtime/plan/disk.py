"""Files of an offload to a disk that is not there: their bytes are counted, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..offload import spill_folder
from .work import WorkMeter


class Transfer:
    """A transfer that is done."""

    done = True

    def wait(self) -> None:
        """Return at once."""


class PlannedFile:
    """One file."""

    def __init__(self, disk: PlannedDisk, nbytes: int) -> None:
        self._disk, self.nbytes = disk, nbytes

    def read(self, array: Tensor, offset: int = 0) -> Transfer:
        """Count the bytes of a read."""
        self._disk.moved("from disk", array.nbytes)
        return Transfer()

    def write(self, array: Tensor, offset: int = 0) -> Transfer:
        """Count the bytes of a write."""
        self._disk.moved("to disk", array.nbytes)
        return Transfer()

    def close(self) -> None:
        """Do nothing."""


class PlannedDisk:
    """All files of this rank."""

    def __init__(self, work: WorkMeter) -> None:
        self.nbytes = 0
        self._work = work

    def moved(self, way: str, num_bytes: int) -> None:
        """Count what is read or written."""
        self._work.add_copy(way, num_bytes)

    def put(self) -> None:
        """Use it in place of the disk engine, in this process."""
        names: dict[str, Any] = {
            "DiskEngine": lambda **_: self,
            "DiskFolder": _Folder,
            "aligned_empty": int,
            "from_dlpack": lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cpu"),
        }
        for name, value in names.items():
            setattr(spill_folder, name, value)

    def create(self, path: Path, nbytes: int) -> PlannedFile:
        """Return a file of so many bytes."""
        self.nbytes += nbytes
        return PlannedFile(self, nbytes)

    def close(self) -> None:
        """Do nothing."""


class _Folder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def claim(cls, nvme_path: str | os.PathLike[str], job_id: str, rank: int) -> _Folder:
        """Return a folder that is not made."""
        return cls(Path(nvme_path))

    def close(self) -> None:
        """Do nothing."""

"""Files of a rank's notes on a step: tensors by name, and numbers beside them.

A file of bytes holds one tensor after the other, and a file of JSON, written last, says where each begins. So
a tensor at a time is in memory, in a writer as in a reader.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import RecordingError

_BYTES, _INDEX = ".bin", ".json"


class TensorWriter:
    """Writes the files of one rank and step; they count when `close` has returned.

    Errors: of each call RecordingError if the disk is full, for example
    """

    def __init__(self, path: Path) -> None:
        """`path` is the beginning of the names of both files."""
        self._path = path
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(f"{path}{_BYTES}", "wb")  # noqa: SIM115  (closed by close)
        self._places: dict[str, tuple[int, str, list[int]]] = {}

    def add(self, key: str, value: Tensor) -> None:
        """Append a tensor."""
        own = value.detach().to("cpu").contiguous()
        self._places[key] = (self._file.tell(), str(own.dtype).removeprefix("torch."), list(own.shape))
        with self._told():
            try:
                self._file.write(own.reshape(-1).view(torch.uint8).numpy().data)
            except OSError:
                with suppress(OSError):  # it writes what waits in a buffer
                    self._file.close()
                raise

    def close(self, notes: dict[str, Any]) -> None:
        """Finish the files; `notes` are values of JSON."""
        temporary = f"{self._path}{_INDEX}.part"
        with self._told():
            self._file.close()
            Path(temporary).write_text(json.dumps({"tensors": self._places, "notes": notes}))
            os.replace(temporary, f"{self._path}{_INDEX}")

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecordingError(
                f"dslaunch numerics: {self._path}{_BYTES}: {error.strerror}; a recording needs about 32 "
                "bytes for each trained parameter and step: give a folder with more room by --keep=DIR, or "
                "fewer steps by --steps"
            ) from None


class TensorReader:
    """Reads such files."""

    def __init__(self, path: Path) -> None:
        """Errors: OSError, ValueError if they are not there or damaged"""
        written = json.loads(Path(f"{path}{_INDEX}").read_text())
        self.notes: dict[str, Any] = written["notes"]
        self._places: dict[str, tuple[int, str, list[int]]] = written["tensors"]
        self._path = path

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names of all tensors, in the order in which they were written."""
        return tuple(self._places)

    def read(self, key: str) -> Tensor:
        """Return a tensor, in host memory."""
        begin, name, shape = self._places[key]
        dtype: torch.dtype = getattr(torch, name)
        value = torch.empty(shape, dtype=dtype, device="cpu")
        with open(f"{self._path}{_BYTES}", "rb") as file:
            file.seek(begin)
            num_read = file.readinto(value.reshape(-1).view(torch.uint8).numpy().data)
        if num_read != value.nbytes:
            raise ValueError(f"{self._path}{_BYTES} ends inside of {key}")
        return value


def is_written(path: Path) -> bool:
    """Tell whether the files at `path` are whole."""
    return Path(f"{path}{_INDEX}").exists()

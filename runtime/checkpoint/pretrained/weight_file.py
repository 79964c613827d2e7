"""Files of weights: of safetensors, and of torch.save. Headers are read at once, elements when wanted."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...strided import is_strided
from ..storage.regular_file import open_regular
from .lazy import Runs, Sizes, Values

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # safetensors itself allows no more
_BLOCK_BYTES = 8 << 20
_SHORT_BYTES = 64 << 10  # to read on over shorter gaps takes no longer than to ask for each piece
_MAX_OPEN = 8
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
AGAIN = "copy or download the folder again"
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # keys of other programs' checkpoints
_CONVERT = (
    "convert it to safetensors with the transformers that wrote it: from_pretrained(), then save_pretrained()"
)


class OpenFiles:
    """The files that were read last, and memory for blocks of them."""

    def __init__(self) -> None:
        self._files: dict[Path, IO[bytes]] = {}
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def descriptor(self, path: Path) -> int:
        """Return that of a file, which is opened if it is not.

        Errors: OSError
        """
        if path not in self._files:
            if len(self._files) == _MAX_OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[path] = open_regular(path)
        return self._files[path].fileno()

    def close(self) -> None:
        """Close all of them, until they are read again."""
        while self._files:
            self._files.popitem()[1].close()

    def take(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] of uint8, until the next call."""
        if self._bytes.numel() < num_bytes:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._bytes[:num_bytes]


class SafetensorsFile:
    """A file of safetensors, whole as far as its size tells.

    Errors: CheckpointError, of all methods, that names the file
    """

    def __init__(self, path: Path, files: OpenFiles) -> None:
        self.path, self._files = path, files
        try:
            self.num_bytes = os.fstat(files.descriptor(path)).st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        length = self._length()
        header = self._header(length)
        self._first = _LENGTH.size + length
        self.values: dict[str, Values] = {
            name: self._values(name, entry) for name, entry in header.items() if name != "__metadata__"
        }

    def read_into(self, out: memoryview, offset: int) -> None:
        """Fill `out` with the bytes at `offset`."""
        done = 0
        try:
            descriptor = self._files.descriptor(self.path)
            while done < len(out):
                count = os.preadv(descriptor, [out[done:]], offset + done)
                if count == 0:
                    raise self._damaged(f"ends after {offset + done} bytes, in the middle of a tensor")
                done += count
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error

    def read_block(self, num_bytes: int, offset: int) -> Tensor:
        """Return [num_bytes] of uint8, until the next call."""
        block = self._files.take(num_bytes)
        self.read_into(block.numpy().data, offset)
        return block

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {what}; {AGAIN}")

    def _length(self) -> int:
        if self.num_bytes < _LENGTH.size:
            raise self._damaged(f"has {self.num_bytes} bytes, and is no file of safetensors")
        prefix = bytearray(_LENGTH.size)
        self.read_into(memoryview(prefix), 0)
        length: int = _LENGTH.unpack(prefix)[0]
        if length > _MAX_HEADER_BYTES:
            raise self._damaged("does not begin as a file of safetensors does")
        if _LENGTH.size + length > self.num_bytes:
            raise self._damaged(f"ends after {self.num_bytes} bytes, in the middle of its header")
        return length

    def _header(self, length: int) -> Mapping[str, Any]:
        text = bytearray(length)
        self.read_into(memoryview(text), _LENGTH.size)
        try:
            header = json.loads(text)
        except ValueError as error:  # UnicodeDecodeError is one, too
            raise self._damaged(f"has a header that is no JSON ({error})") from error
        except RecursionError as error:
            raise self._damaged("has a header that is too deep") from error
        if not isinstance(header, dict):
            raise self._damaged("has a header that is no table")
        return header

    def _values(self, name: str, entry: Any) -> FileValues:
        try:
            kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"has no dtype, shape and place of tensor '{name}' in its header") from error
        numbers = [begin, end, *(shape if isinstance(shape, list) else [None])]
        if not all(type(one) is int and one >= 0 for one in numbers):
            raise self._damaged(f"has a shape or place of tensor '{name}' in its header that is no number")
        dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor '{name}' has elements of {kind!r}; known are {', '.join(_DTYPES)}"
            )
        if end - begin != prod(shape) * dtype.itemsize:
            raise self._damaged(
                f"has {end - begin} bytes for tensor '{name}', {kind} of shape {tuple(shape)}"
            )
        if self._first + end > self.num_bytes:
            raise self._damaged(
                f"ends after {self.num_bytes} bytes, and tensor '{name}' goes on to {self._first + end}"
            )
        return FileValues(self, dtype, tuple(shape), self._first + begin)


class FileValues(Values):
    """A tensor of such a file."""

    def __init__(self, file: SafetensorsFile, dtype: torch.dtype, shape: Sizes, first_byte: int) -> None:
        super().__init__(shape, dtype)
        self._file, self._first_byte = file, first_byte

    @property
    def parts(self) -> tuple[Values, ...]:
        return ()

    def fill(self, out: Tensor, offsets: Sizes) -> None:
        if out.numel() == 0:
            return
        runs = Runs(self.shape, offsets, tuple(out.shape))
        dim = runs.dim
        gap = runs.stride(dim - 1) - runs.numel if dim else 0
        if dim and gap * self.dtype.itemsize < _SHORT_BYTES:
            dim -= 1  # rows with gaps between them, which are read as well
        for place, first in runs.places(dim):
            part = out[place]
            if part.dim() == 0:
                part = part.view(1)
            self._read_rows(part, first, runs.stride(dim))

    def _read_rows(self, out: Tensor, first: int, stride: int) -> None:
        """Fill `out`; its rows begin `stride` elements after each other in the file."""
        size, numel = self.dtype.itemsize, prod(out.shape[1:])
        is_same = out.dtype == self.dtype and out.device.type == "cpu" and out.is_contiguous()
        if stride == numel and is_same:
            bytes_of_out = out.detach().reshape(-1).view(torch.uint8)
            self._file.read_into(bytes_of_out.numpy().data, self._first_byte + first * size)
            return
        num_rows = max(1, _BLOCK_BYTES // (stride * size))
        for row in range(0, out.shape[0], num_rows):
            rows = out[row : row + num_rows]
            count = (len(rows) - 1) * stride + numel
            block = self._file.read_block(count * size, self._first_byte + (first + row * stride) * size)
            values = block.view(self.dtype).as_strided((len(rows), numel), (stride, 1))
            rows.copy_(values.reshape(rows.shape))


class _LoadedValues(Values):
    """A tensor that lies in a file mapped into memory."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor

    @property
    def parts(self) -> tuple[Values, ...]:
        return ()

    def fill(self, out: Tensor, offsets: Sizes) -> None:
        value = self._tensor
        for dim, (start, size) in enumerate(zip(offsets, out.shape, strict=True)):
            value = value.narrow(dim, start, size)
        out.copy_(value)


class TorchFile:
    """A state_dict that torch.save wrote.

    Errors: CheckpointError that names the file
    """

    def __init__(self, path: Path) -> None:
        try:
            with open_regular(path) as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
            said = (str(error) or "it ends too early").splitlines()[0] if self.num_bytes else "it is empty"
            is_damaged = not self.num_bytes or isinstance(error, EOFError) or "PytorchStreamReader" in said
            raise CheckpointError(
                f"{path} cannot be read: {said}; {AGAIN if is_damaged else _CONVERT}"
            ) from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} holds {type(state).__name__}, and no weights by name")
        self.values: dict[str, Values] = {
            name: _LoadedValues(value.detach()) for name, value in state.items() if is_strided(value)
        }
        inner = next((name for name in _WRAPPERS if isinstance(state.get(name), dict)), None)
        if not self.values and inner is not None:
            raise CheckpointError(
                f"{path} has the weights in {inner!r}, beside other things of a training; save that part of "
                f"it alone: torch.save(torch.load(PATH)[{inner!r}], PATH)"
            )

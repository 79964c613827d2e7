"""Writing a folder of weights for other programs, tensor after tensor, each where `plan_output` puts it.

A safetensors file is written by hand and not by its library, which wants all tensors of a file in memory at
once: the format is the length of a header (8 bytes, little-endian), the header (JSON: dtype, shape and place
of each tensor), and the tensors.
Source: https://github.com/huggingface/safetensors, "Format"
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import IO, Any, cast

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..storage.store import PARTIAL, Store
from ..storage.stream import ByteStream
from .output_plan import OutputFile, OutputPlan, Spec

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_AROUND_TENSOR = 4096  # more than torch.save puts around one, and as much for its names
_AROUND_FILE = 1 << 16


class OutputFiles:
    """The files of a plan, which are there under their names when all of them are complete.

    Use: `with Output(...) as output:` and `output.put(name, tensor)` for all names,
    in the order of `plan.order()`.
    Errors: CheckpointError that names the file if it cannot be written; nothing of it is left then
    """

    def __init__(self, store: Store, plan: OutputPlan) -> None:
        self._store, self.plan = store, plan
        self._files = iter(plan.files)
        self._file: OutputFile | None = None
        self._waiting: list[str] = []  # names that the file still has to get, last one first
        self._held: dict[str, Tensor] = {}  # tensors of a file that torch.save writes
        self._stack = ExitStack()
        self._stream: ByteStream | None = None
        self._done: list[str] = []
        self._prefix: str | None = None  # prefix of names before they are published
        self.where = f"{store.where}/{plan.index_name or plan.files[0].name}"
        for name, spec in ((name, spec) for file in plan.files for name, spec in file.specs.items()):
            if plan.is_safetensors and spec.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{name} is of {spec.dtype}, which safetensors has no word for; write .bin"
                )

    def put(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, in host memory."""
        try:
            if not self._waiting:
                self._begin()
            file = self._file
            if file is None or name != self._waiting.pop():
                raise AssertionError(f"{name} is not the next tensor of {file and file.name}")
            if Spec(tuple(tensor.shape), tensor.dtype) != file.specs[name]:
                raise AssertionError(
                    f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, planned {file.specs[name]}"
                )
            if self.plan.is_safetensors:
                self._write(tensor)
            else:
                self._held[name] = tensor
            if not self._waiting:
                self._end()
        except (OSError, RuntimeError) as error:  # torch's writer makes a RuntimeError of a full disk
            name = self._file.name if self._file else ""
            raise CheckpointError(f"{self._store.where}/{name} cannot be written: {error}") from error

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            try:
                self._publish()
            except OSError as failure:
                self._give_up(None, None, None)
                raise CheckpointError(f"{self.where} cannot be written: {failure}") from failure
        else:
            self._give_up(kind, error, trace)

    def _give_up(self, *failure: Any) -> None:
        begun = [self._file.name] if self._file is not None and self._stream is not None else []
        self._stack.__exit__(*failure)
        if self._prefix is not None:
            self._store.abandon_output(self._prefix, [*self._done, *begun])

    def _begin(self) -> None:
        self._file = next(self._files)
        if self._prefix is None:
            self._prefix = self._store.begin_output()
        self._waiting = list(self._file.specs)[::-1]
        header = _header(self._file, self.plan.aliases) if self.plan.is_safetensors else b""
        around = len(header) + _AROUND_FILE + sum(_AROUND_TENSOR + 2 * len(name) for name in self._waiting)
        self._stream = self._stack.enter_context(
            self._store.stream(f"{self._prefix}{self._file.name}", capacity=self._file.num_bytes + around)
        )
        if header:
            self._stream.write(header)

    def _write(self, tensor: Tensor) -> None:
        if self._stream is None:
            raise AssertionError("no file is open")
        if tensor.numel():
            self._stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _end(self) -> None:
        if self._file is None or self._stream is None:
            raise AssertionError("no file is open")
        if not self.plan.is_safetensors:
            others = {
                other: self._held[name] for other, name in self.plan.aliases.items() if name in self._held
            }
            torch.save({**self._held, **others}, cast("IO[bytes]", _Sink(self._stream)))
            self._held = {}
        self._stack.close()
        self._stream = None
        self._done.append(self._file.name)

    def _publish(self) -> None:
        if not self._done and not any(file.specs for file in self.plan.files):  # a model without tensors
            self._begin()
            self._end()
        if len(self._done) != len(self.plan.files):
            raise AssertionError(f"{len(self._done)} of {len(self.plan.files)} files are written")
        if self._prefix is None:
            raise AssertionError("no file was begun")
        names = list(self._done)
        if self.plan.index_name is not None:
            names.append(self.plan.index_name)
            index = json.dumps(self.plan.index(), indent=2).encode() + b"\n"
            self._store.put(f"{self._prefix}{self.plan.index_name}", index)
        self._store.publish_output(
            self._prefix, names, [one for one in self._store.files("") if self._is_stale(one)]
        )

    def _is_stale(self, name: str) -> bool:
        """Whether it is of another export, or one that was killed: of an older version,
        that left such partial files.
        """
        is_partial = name.startswith(".") and name.endswith(PARTIAL)
        return self.plan.is_stale(name) or (is_partial and self.plan.has_shape(name[1 : -len(PARTIAL)]))


def _header(file: OutputFile, aliases: Mapping[str, str]) -> bytes:
    """`format` is what transformers asks for; other names of tied tensors stand beside it, as in
    safetensors' save_model.
    """
    own = {other: name for other, name in aliases.items() if name in file.specs}
    entries: dict[str, Any] = {"__metadata__": {**own, "format": "pt"}}
    offset = 0
    for name, (shape, dtype) in file.specs.items():
        end = offset + Spec(shape, dtype).num_bytes
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors to a multiple of 8
    return len(text).to_bytes(8, "little") + text


class _Sink(io.RawIOBase):
    """File object that torch.save writes to."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        return self._stream.write(data)

    def writable(self) -> bool:
        return True

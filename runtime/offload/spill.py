"""The optimizer states of one sub-buffer in files, between their uses.

The tensors stay the same objects. While its values are in a file, a tensor is one NaN expanded to its shape,
so that a read by mistake is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ...kernels.disk import DiskFile, DiskRequest
from ..errors import OffloadError
from ..strided import no_value
from ..tracing.spans import SPANS
from .spill_folder import SpillFolder


class Spill:
    """Spill of the states that `tensors` returns by name. While the states are in memory, they may be
    replaced by a new set.
    """

    def __init__(
        self, folder: SpillFolder, name: str, tensors: Callable[[], Mapping[str, Tensor]], *, what: str
    ) -> None:
        """`what` names the tensors, for a trace."""
        self._folder, self._name, self._tensors, self._what = folder, name, tensors, what
        # for a trace: the kind of requests under way, and when they began
        self._begun: tuple[str, int] = ("", 0)
        self._files: dict[str, DiskFile] = {}  # name of state -> file
        self._requests: list[DiskRequest] = []
        self._is_here = True
        self._num_users = 0

    def reserve(self, name: str, nbytes: int) -> None:
        """Make sure that there is a file for the state of this name.

        Errors: OffloadError if there is no space
        """
        if name not in self._files:
            with _told():
                self._files[name] = self._folder.create(f"{self._name}.{name}", nbytes)

    def take_memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor that is written and read without a copy on the way."""
        return self._folder.take_memory(shape, dtype)

    def give_memory(self, tensor: Tensor) -> None:
        """Give back a tensor's memory, to which nothing writes any more."""
        self._folder.give_memory(tensor)

    def lend(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Return the values of a tensor that is in memory, and a function to call when they have been read.
        Until then their memory is not reused, even if the tensor itself goes to its file.
        """
        values = tensor.detach()
        self._folder.keep_memory(values)
        return values, lambda: self._folder.give_memory(values)

    @property
    def is_ready(self) -> bool:
        """Tell whether the tensors are read, so that `finish_in` returns at once."""
        return all(request.done for request in self._requests) if self._requests else self._is_here

    def start_in(self) -> None:
        """Begin to read the tensors, unless they are in memory or already being read."""
        if self._is_here or self._requests:
            return
        self._note_begin("read")
        for name, tensor in self._tensors().items():
            tensor.data = self._folder.take_memory(tensor.shape, tensor.dtype)
            with _told():
                self._requests.append(self._files[name].read(tensor))

    def finish_in(self) -> None:
        """Wait until the tensors are in memory.

        Errors: OffloadError
        """
        self.start_in()
        self._wait()
        self._is_here = True

    def start_out(self) -> None:
        """Begin to write the tensors."""
        self._is_here = True
        self._note_begin("write")
        for name, tensor in self._tensors().items():
            self.reserve(name, tensor.nbytes)
            with _told():
                self._requests.append(self._files[name].write(tensor))

    def finish_out(self) -> None:
        """Wait until the tensors are written, and give their memory back.

        Errors: OffloadError
        """
        self._wait()
        self._drop()

    @contextmanager
    def here(self, *, is_written: bool) -> Iterator[None]:
        """Have the tensors in memory inside the context; `is_written`: they were changed, so write them at
        the end. Do not use it while a step is under way.
        """
        self.finish_in()
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            if is_written:
                self.start_out()
                self._wait()
            if not self._num_users:
                self._drop()

    def _wait(self) -> None:
        requests, self._requests = self._requests, []
        verb, begun = self._begun
        since = time.monotonic_ns() if requests and begun else 0
        for request in requests:
            with _told():
                request.wait()
        if since:
            self._begun = ("", 0)
            SPANS.add("disk", f"{verb} {self._what}", begun)
            SPANS.add("disk wait", f"wait for {verb} of {self._what}", since)

    def _note_begin(self, verb: str) -> None:
        if SPANS.is_on:
            self._begun = (verb, time.monotonic_ns())

    def _drop(self) -> None:
        self._is_here = False
        for tensor in self._tensors().values():
            self._folder.give_memory(tensor.data)
            gone = torch.full((1,), no_value(tensor.dtype), dtype=tensor.dtype, device="cpu")
            tensor.data = gone.expand(tensor.shape)


@contextmanager
def _told() -> Iterator[None]:
    """Turn an error of the disk into an OffloadError of one line."""
    try:
        yield
    except OSError as error:
        raise OffloadError(
            f"offloading to NVMe: {error}; free space there, or name another folder as nvme_path"
        ) from error

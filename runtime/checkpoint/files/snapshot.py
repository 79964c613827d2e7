"""Copies in host memory of the tensors of `TensorRuns`, to be written while the originals change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ...offload.pinned_memory import host_empty
from .tensor_runs import TensorRun, TensorRuns


class Memory:
    """Memory of earlier copies, kept for the next ones: to get it from the system takes longer than to copy.

    One thread at a time.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, values: Tensor) -> Tensor:
        """Return a tensor in host memory that `values` can be copied into; what is in it is not defined."""
        for place, tensor in enumerate(self._free):
            if (tensor.dtype, tensor.shape) == (values.dtype, values.shape):
                return self._free.pop(place)
        return host_empty(values.shape, values.dtype, pin_memory=values.is_cuda)

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Take memory back."""
        self._free += tensors

    def clear(self) -> None:
        """Free all memory that is not in use."""
        self._free.clear()


class Snapshot:
    """Copies of one `TensorRuns`. The writer reports a failed copy: no rank may miss a collective."""

    def __init__(self, tensor_runs: TensorRuns, memory: Memory) -> None:
        """Copy nothing yet."""
        self._source, self._memory = tensor_runs, memory
        self._ranges = {
            kind: _range(tensor_runs, kind) for kind in {run.flat: None for run in tensor_runs.runs}
        }
        self._copies: dict[str, Tensor] = {}
        self._problem: Exception | None = None
        self._moment: torch.cuda.Event | None = None
        runs: list[TensorRun] = [
            replace(run, offset=run.offset - self._ranges[run.flat][0]) for run in tensor_runs.runs
        ]
        self.tensor_runs = replace(
            tensor_runs,
            runs=tuple(runs),
            flats=self._flats,
            here=lambda is_written: nullcontext(),
            exposed=frozenset(),
        )

    def take_exposed(self) -> None:
        """Copy the values that may change at any time."""
        self._take([kind for kind in self._ranges if kind in self._source.exposed])

    def note_moment(self) -> None:
        """The rest is copied as the device has it after all that this thread's stream was told so far."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._moment = torch.cuda.current_stream().record_event()

    def take_rest(self) -> None:
        """Copy the rest, beside what the device computes; in any thread."""
        self._take([kind for kind in self._ranges if kind not in self._source.exposed])

    @torch.no_grad()
    def _take(self, kinds: Iterable[str]) -> None:
        try:
            with self._source.here(False):
                flats = self._source.flats()
                for kind in kinds:
                    values = flats[kind][slice(*self._ranges[kind])]
                    # a thread begins with the first GPU, on which memory would be registered
                    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
                        self._copies[kind] = self._memory.take(values)
                        self._copy(values, self._copies[kind])
        except Exception as error:
            self._problem = error

    def _copy(self, values: Tensor, target: Tensor) -> None:
        if self._moment is None or not values.is_cuda:
            target.copy_(values)
            return
        # Another thread's current stream is the default one: copies there would stand between the kernels of
        # a program, and would not wait for one that trains in a stream of its own.
        stream = torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._moment)
        with torch.cuda.stream(stream):
            target.copy_(values, non_blocking=True)
        stream.synchronize()

    def give_back(self) -> None:
        """The copies have been written."""
        self._memory.give(self._copies.values())
        self._copies = {}

    def _flats(self) -> Mapping[str, Tensor]:
        if self._problem is not None:
            raise self._problem
        return self._copies


def _range(tensor_runs: TensorRuns, kind: str) -> tuple[int, int]:
    of_kind = [run for run in tensor_runs.runs if run.flat == kind]
    return min(run.offset for run in of_kind), max(run.offset + run.numel for run in of_kind)

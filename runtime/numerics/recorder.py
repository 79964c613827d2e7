"""Notes of one rank on an engine's steps, and the end of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..comm.end_program import end_program
from ..environment import NumericsRun
from .record import GRADIENT, place_of
from .tensor_file import TensorWriter

MOST_SKIPPED = 20  # steps without an update that are allowed beyond those asked for

_num_engines: Counter[tuple[str, str]] = Counter()  # engines of this process so far, by folder and part


class Recorder:
    """Files of one engine on this rank: one of the state before the first step, then one for each step.

    Order: all ranks call its methods in the same order
    """

    def __init__(self, run: NumericsRun) -> None:
        key = (run.folder, run.part)
        self.run, self.number = run, _num_engines[key]
        _num_engines[key] += 1
        self._rank = dist.get_rank()
        self._losses: list[float] = []
        self._writer: TensorWriter | None = None
        self._step = 0
        self._num_applied = 0

    def path_of(self, part: str, step: int) -> Any:
        """Return the beginning of the names of this rank's files."""
        return place_of(self.run.folder, part, self.number, step, self._rank)

    @property
    def step(self) -> int:
        """Return the number of the step that is under way, from 1."""
        return self._step + 1

    def begin(self, values: Mapping[str, Iterable[tuple[str, Tensor]]], notes: dict[str, Any]) -> None:
        """Write the state before the first step, which replaces one that was written before; `values` are by
        kind.
        """
        writer = TensorWriter(self.path_of(self.run.part, 0))
        for kind, named in values.items():
            for name, value in named:
                writer.add(kind + name, value)
        writer.close(notes)

    def note_loss(self, loss: Tensor | float) -> None:
        """Note the loss of a micro batch."""
        self._losses.append(float(loss.detach()) if isinstance(loss, Tensor) else loss)

    def before_update(self, gradients: Iterable[tuple[str, Tensor]], *, scale: float) -> None:
        """Write the gradients of the step that is due; they are times `scale`."""
        self._writer = TensorWriter(self.path_of(self.run.part, self.step))
        for name, value in gradients:
            self._writer.add(GRADIENT + name, value if scale == 1.0 else value / scale)

    def after_update(self, values: Mapping[str, Iterable[tuple[str, Tensor]]], notes: dict[str, Any]) -> None:
        """Write what is there after the step, by kind; then end the run if it was the last one."""
        if self._writer is None:
            raise AssertionError("a step ends that has not begun")
        for kind, named in values.items():
            for name, value in named:
                self._writer.add(kind + name, value)
        norm = notes["norm"]
        notes["norm"] = norm if norm is not None and isfinite(norm) else None
        losses = [one if isfinite(one) else None for one in self._losses]
        self._writer.close({**notes, "losses": losses})
        self._writer, self._losses = None, []
        self._step += 1
        self._num_applied += bool(notes["is_applied"])
        is_last = self._num_applied >= self.run.steps or self._step >= self.run.steps + MOST_SKIPPED
        if is_last and self.number == 0:
            end_program()

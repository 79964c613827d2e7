"""A trial of `dslaunch plan --tune`: the times of this rank's first optimizer steps, then the program's end.

A step lasts from the end of the step before to its own end, with all that the program does between, and the
device has finished it. Steps without an update, as of a loss scale that is too large, are not counted.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.training_state import Progress
from ..comm.end_program import end_program
from ..environment import TrialRun, read_trial
from .pipe import Pipe, process_pipe

MOST_SKIPPED = 20  # steps without an update that are allowed beyond those asked for
_TOLD_WITHIN_S = 10.0
_NAME = "trial"  # the metric's name in what a rank tells the launcher


class StepTrial:
    """The measurement of one process: of its engines the one that makes the first step is measured."""

    def __init__(self, run: TrialRun, pipe: Pipe | None, *, end: Callable[[], object] = end_program) -> None:
        self._run, self._pipe, self._end = run, pipe, end
        self._progress: Progress | None = None  # that of the measured engine
        self._ended_at = 0.0
        self._num_steps = self._num_skipped = self._num_samples = self._num_samples_before = 0
        self._times_s: list[float] = []
        self._num_rows: int | None = None  # samples of a micro batch, as its first tensor shows them
        self._is_told = False
        atexit.register(self._tell)  # a program may end before its trial does

    def note_inputs(self, given: Any) -> None:
        """Note how many samples a micro batch really has."""
        if self._num_rows is None:
            first = _first_tensor(given)
            self._num_rows = None if first is None or first.dim() == 0 else first.shape[0]

    def end_step(self, progress: Progress, device: torch.device) -> None:
        """Note the end of an optimizer step; after the last one the program ends.

        Order: all ranks call it after the same steps
        """
        if self._progress is None:
            self._progress = progress
        if self._progress is not progress:
            return
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        self._num_steps += 1
        is_applied = progress.skipped_steps == self._num_skipped
        if is_applied and self._num_steps > self._run.warm_up:
            self._times_s.append(now - self._ended_at)
            self._num_samples = progress.global_samples - self._num_samples_before
        self._num_skipped, self._num_samples_before = progress.skipped_steps, progress.global_samples
        self._ended_at = now
        most = self._run.warm_up + self._run.steps + MOST_SKIPPED
        if len(self._times_s) == self._run.steps or self._num_steps == most:
            self._tell()
            self._end()

    def _tell(self) -> None:
        """Tell the launcher, once."""
        if self._is_told or self._pipe is None or not self._pipe.is_ours:  # a forked child tells nothing
            return
        self._is_told = True
        told = {
            "steps_s": self._times_s,
            "samples": self._num_samples,
            "num_steps": self._num_steps,
            "rows": self._num_rows,
            "kept_files": self._run.kept_files,
        }
        self._pipe.tell_file(_NAME, json.dumps(told))
        self._pipe.wait_until_told(_TOLD_WITHIN_S)


def _first_tensor(given: Any) -> Tensor | None:
    """Return the first tensor, depth first."""
    if isinstance(given, Tensor):
        return given
    parts = given.values() if isinstance(given, dict) else given if isinstance(given, (tuple, list)) else ()
    return next((found for one in parts if (found := _first_tensor(one)) is not None), None)


@cache
def process_trial() -> StepTrial | None:
    """Return the trial of this process; None unless `dslaunch plan --tune` has started it."""
    run = read_trial()
    return None if run is None else StepTrial(run, process_pipe())

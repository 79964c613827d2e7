"""Tracer of the steps that `dslaunch --trace` asks this process for, and of the files with the result.

What is written
---------------
`DSLAUNCH_TRACE_FILE` is the beginning of two file names. `.spans` has one JSON object a line: the first says
which rank this is; after each step come that step's spans (`Span`); the last says that the trace is whole.
`.torch.json` is torch's own profile, written when the last step or the program has ended. So the trace of a
rank that is killed has all its finished steps, without torch's operators.

A step goes from the end of the one before to its own end: what the program does between two calls of
`engine.step()` is all in one step. Times are CLOCK_MONOTONIC's, as those of the host's agent; torch's profile
has the system's time, and both clocks are read together at the beginning and the end.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from ...shared import marks
from ..environment import TraceRequest, read_environment, read_trace
from .spans import SPANS, Span
from .torch_profile import TorchProfile

if TYPE_CHECKING:
    from .unit_hooks import TracedUnit, UnitHooks


class Tracer:
    """Tracer of this process. The engine calls `enter` and `end_step`, or, in a program without an engine,
    `dslaunch.report(step=...)` does.

    While `is_armed` is false no call is needed.
    """

    def __init__(self, request: TraceRequest | None) -> None:
        self._request = request
        self.is_armed = request is not None
        self.has_engine = False
        self._units: weakref.WeakMethod[Callable[[], Sequence[TracedUnit]]] | None = None
        self._hooks: UnitHooks | None = None
        self._profile = TorchProfile()
        self._is_warm = self._has_begun = False
        self._file = -1
        self._step = 0  # the step whose window is open; 0: none is
        self._began = 0
        self._data_since = 0
        self._marked = -1  # the last step that a program without an engine has reported
        self._has_failed = False

    # ---- what an engine tells

    def watch(self, units: Callable[[], Sequence[TracedUnit]]) -> None:
        """Trace the units that this engine's method returns; from now on only the engine's steps count."""
        self.has_engine = True
        self._units = weakref.WeakMethod(units)  # weak, so that a destroyed engine's memory is freed
        if self.is_armed:
            self._open()

    def enter(self, step: int) -> None:
        """Note that this step, counted from 1, is running or about to begin."""
        request = self._request
        if request is None or self._step or not self.is_armed:
            return
        self._open()
        if step > request.last:
            self._close("whole" if self._has_begun else f"step {step} came first")
        elif step >= request.first:
            self._start()
            self._begin_window(step)
        elif step == request.first - 1 and not self._is_warm and not self._has_failed:
            self._is_warm = True
            self._profile.warm_up()

    @contextmanager
    def phase(self, kind: str, inner: AbstractContextManager[object]) -> Iterator[None]:
        """Enter `inner`, and add a span for an engine's "forward", "backward" or "step" if steps
        are traced.
        """
        began = time.monotonic_ns()
        if kind == "forward" and self._data_since:
            SPANS.add("data", "data", self._data_since, began)
        self._data_since = 0
        kind = "optimizer" if kind == "step" else kind
        if kind == "optimizer" and self._hooks is not None:
            self._hooks.end_backward()
        try:
            with _marked(kind), inner:
                yield
        finally:
            if kind == "backward" and self._hooks is not None:
                self._hooks.end_backward()
            SPANS.add(kind, kind, began)

    def end_micro_batch(self) -> None:
        """Count the program's time from now until the next forward as loading of data."""
        self._data_since = time.monotonic_ns()

    def end_step(self, step: int) -> None:
        """Note that this step, counted from 1, has ended."""
        if self._step:
            self._end_window()
            if SPANS.num_dropped:
                self._close("they are more than a trace can hold")
        self.enter(step + 1)

    def mark(self, step: int) -> None:
        """Note that a program without an engine has made this step; it may say so more than once. Spans from
        the time of several steps are not counted as one step's.
        """
        if step == self._marked:
            return
        self._marked = step
        if self._step and step != self._step:
            SPANS.take()
            first, self._step = self._step, 0
            self._close(f"report(step={step}) came next, and one for each step is needed from {first - 1} on")
            return
        self.end_step(step)

    # ---- the trace

    def _open(self) -> None:
        """Begin the file with a line about this rank, which is there even if no step is reached."""
        if self._file >= 0 or self._request is None or self._has_failed:
            return
        worker = read_environment()
        path = f"{self._request.path}.spans"
        try:
            self._file = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            self._fail(path, error)
            return
        atexit.register(self._end_program)
        os.register_at_fork(after_in_child=self._forget)  # a DataLoader's workers are such children
        head = {"rank": worker.rank, "hostname": socket.gethostname(), "pid": os.getpid()}
        self._write({**head, "world_size": worker.world_size, "thread": threading_id(), "clock": _clocks()})

    def _start(self) -> None:
        if self._has_failed or SPANS.is_on:
            return
        self._has_begun = True
        self._profile.start()
        torch = sys.modules.get("torch")
        SPANS.begin(has_gpu=torch is not None and torch.cuda.is_available())
        find_units = None if self._units is None else self._units()
        units = find_units() if find_units is not None else ()
        if units:
            from .unit_hooks import UnitHooks

            self._hooks = UnitHooks(units, SPANS)

    def _begin_window(self, step: int) -> None:
        self._step = step
        self._began = time.monotonic_ns()
        self._data_since = self._began if self.has_engine else 0

    def _end_window(self) -> None:
        ended = time.monotonic_ns()
        if self._hooks is not None:
            self._hooks.end_backward()
        spans = [list(_short(span)) for span in SPANS.take()]
        self._write({"step": self._step, "began": self._began, "ended": ended, "spans": spans})
        self._step = 0

    def _close(self, why: str) -> None:
        """Write the spans that are left."""
        self.is_armed = False
        SPANS.end()
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        clocks = _clocks()
        path = "" if self._request is None else f"{self._request.path}.torch.json"
        said = self._profile.write(path) if self._has_begun else ""
        self._write({"end": why, "problem": said, "num_dropped": SPANS.num_dropped, "clock": clocks})
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _forget(self) -> None:
        """Forget the trace in a forked child: it is the parent's."""
        self.is_armed, self._file, self._step = False, -1, 0
        self._profile.forget()
        SPANS.end()

    def _end_program(self) -> None:
        """End the trace because the program ends, perhaps in the middle of a step."""
        if self.is_armed:
            self._close("the program ended")
        self._profile.end()

    def _write(self, what: dict[str, Any]) -> None:
        if self._file < 0:
            return
        left = memoryview(json.dumps(what, separators=(",", ":")).encode() + b"\n")
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # the program has closed it
                os.close(self._file)
            self._file = -1
            self._fail(f"{self._request.path}.spans" if self._request else "", error)

    def _fail(self, path: str, error: OSError) -> None:
        """Report the error and trace no more; training goes on."""
        self._has_failed, self.is_armed = True, False
        SPANS.end()
        why = error.strerror or str(error)
        print(
            f"dslaunch: --trace: {path}: {why}; this rank is traced no further", file=sys.stderr, flush=True
        )


def threading_id() -> int:
    """Return the kernel's number of this thread, which torch's profile uses, too."""
    import threading

    return threading.get_native_id()


def _short(span: Span) -> tuple[object, ...]:
    return span if span.args else span[:-1]


def _clocks() -> list[int]:
    """Return CLOCK_MONOTONIC and the time since the epoch, read at one moment, in nanoseconds; then how far
    apart the two readings may be.
    """
    best: list[int] = []
    for _ in range(5):
        before = time.monotonic_ns()
        epoch = time.time_ns()
        after = time.monotonic_ns()
        if not best or after - before < best[2]:
            best = [(before + after) // 2, epoch, after - before]
    return best


def _marked(kind: str) -> AbstractContextManager[object]:
    """Mark the block in torch's profile, too, if there is a GPU: kernels that start inside get its name
    there.
    """
    if not SPANS.has_gpu:
        return contextlib.nullcontext()
    from torch.profiler import record_function

    return record_function(f"{marks.SPAN}{kind}")


_PROCESS: list[Tracer] = []


def process_tracer() -> Tracer:
    """Return the tracer of this process."""
    if not _PROCESS:
        _PROCESS.append(Tracer(read_trace()))
    return _PROCESS[0]


def mark_step(step: int) -> None:
    """Note that a program without an engine has made this step, counted from 1. With an engine this has no
    effect, because the engine reports its own steps.
    """
    tracer = process_tracer()
    if tracer.is_armed and not tracer.has_engine:
        tracer.mark(step)

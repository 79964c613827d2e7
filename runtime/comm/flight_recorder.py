"""The collectives of this rank: the last ones, and those under way."""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

from ...shared import marks
from ..tracing.spans import SPANS
from .comms_log import Stopwatch
from .messages import Messages
from .phases import Phases

T = TypeVar("T")
NUM_LANES = 6  # a lane is a communicator of its own: what two of them send may pass each other in any way
PARAMETER_LANE = 1
JOB_LANE = (
    2  # lane of all ranks, where not all hold the same model: its numbers alone are then those of every rank
)
SEND_LANE = 3  # messages from this rank to another one, in a pipeline
# messages to this rank: they begin before or after a send, as the shapes of its samples are known or not
RECEIVE_LANE = 4
MESSAGE_LANES = (SEND_LANE, RECEIVE_LANE)
# Activations, along tp, sp or ep: what the samples of a few ranks make them send each other. Ranks with other
# samples may send more or less, and more or less often. Each collective has the `ranks` that do it.
DATA_LANE = 5
_NUM_RECENT = 64  # more than two ranks can be apart


class Collective(NamedTuple):
    """One collective as every rank knows it. Equal `number`s of a lane mean that the ranks that have the same
    model do it together; in JOB_LANE, all ranks.
    """

    lane: int
    number: int  # number in its lane, counted from 1
    step: int  # optimizer step, from 1
    op: str
    what: str
    nbytes: int
    axis: str = ""  # axis along which the ranks hold other parts of one layer
    ranks: tuple[int, ...] = ()  # ranks that take part; empty: those that have the same model
    turn: int = 0  # number among the collectives of `ranks`, counted from 1; 0 where `ranks` is empty

    def __str__(self) -> str:
        return f"{self.op} of {self.what}" + (f" over {self.axis}" if self.axis else "")

    @property
    def identity(self) -> tuple[str, str, int]:
        """Return the facts that must be the same on all ranks of its stream."""
        return self.op, self.what, self.nbytes

    @property
    def place(self) -> int:
        """Return its number in its stream, from 1."""
        return self.turn if self.lane == DATA_LANE else self.number

    def stream(self, peers: Sequence[int]) -> Stream:
        """Return the stream that it is in, on a rank that trains the same as these `peers`."""
        if self.lane == DATA_LANE:
            return Stream(self.lane, self.axis, tuple(self.ranks))
        return Stream(self.lane, "", tuple(peers))


class Stream(NamedTuple):
    """Collectives that the same ranks do in the same order: those that train the same parameters; in
    DATA_LANE, those that compute with the same samples, or send each other tokens.
    """

    lane: int
    axis: str  # axis of a DATA_LANE
    ranks: tuple[int, ...]


class Line(NamedTuple):
    """Ranks that do something together, and do not all have the same model; see Collective. Of a message they
    are two: the one that sends it, and the one that receives it.
    """

    axis: str = ""  # empty: the operation's name tells it
    ranks: tuple[int, ...] = ()


class Turns(NamedTuple):
    """Number of collectives, or messages, so far among the ranks of a line."""

    axis: str
    ranks: tuple[int, ...]
    number: int


class Flight:
    """One collective under way. Errors of torch's pass through, after a line that says whose they are."""

    def __init__(
        self, label: Collective, recorder: FlightRecorder, stopwatch: Stopwatch | None = None
    ) -> None:
        """With a `stopwatch`, start() blocks until the result is there."""
        self.label = label
        self.began = time.monotonic()
        self.is_awaited = False  # the program stands still for it
        self._recorder = recorder
        self._stopwatch = stopwatch
        self._work: dist.Work | None = None
        self._event: torch.cuda.Event | None = None  # a GPU's event behind the collective
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether it has come to its end. On a GPU that is later than the end of wait()."""
        work, event = self._work, self._event  # the program's thread may take them away
        if self._is_over or _is_captured():
            return self._is_over
        if event is not None:
            return bool(event.query())  # type: ignore[no-untyped-call]
        return work is not None and work.is_completed()

    @property
    def tells_its_end(self) -> bool:
        """True if `is_over` is known before the collective is waited for."""
        work = self._work
        return not isinstance(work, Messages) or work.tells_its_end

    def start(self, send: Callable[[], dist.Work | None]) -> Flight:
        """Start the collective by `send`; wait() ends it.

        In a CUDA graph that is captured it does not run, now or at wait(), so it counts as over.
        """
        self._is_over = _is_captured()
        if self._stopwatch is not None:
            self._work = self._block(partial(self._stopwatch.time, send))
            return self
        try:
            if SPANS.is_on and SPANS.has_gpu:  # gives NCCL's kernels its name
                with record_function(f"{marks.SPAN}{self.label}"):
                    self._work = send()
            else:
                self._work = send()
        except RuntimeError:
            self._say_failure()
            raise
        return self

    def wait(self) -> None:
        """Block (NCCL: make the current stream wait) until the result is there."""
        if self._work is None:
            raise AssertionError(f"{self.label} was not started")
        self._block(self._work.wait, is_end=True)
        if self._is_over or self._work.is_completed() or not torch.cuda.is_available():
            self._is_over = True
        else:  # NCCL has made the stream wait, and not the host
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        self._work = None  # the work keeps tensors alive

    def begin_with(self, call: Callable[[], T]) -> T:
        """Return `call()`, which blocks, before start(): it gives the work to start."""
        return self._block(call)

    def run(self, call: Callable[[], T]) -> T:
        """Return `call()`, which is the whole collective, and blocks."""
        result = self._block(
            call if self._stopwatch is None else partial(self._stopwatch.time, call), is_end=True
        )
        self._is_over = True
        return result

    def _block(self, call: Callable[[], T], *, is_end: bool = False) -> T:
        """Return `call()`, for which the program stands still. All that observe a wait are told here: the
        watchdog and the hang report (`is_awaited`, `note_progress`), the times of a step, and the trace.
        """
        self.is_awaited = True
        phases = self._recorder.phases
        before = phases.begin_wait() if phases is not None and phases.is_timed else None
        since = time.monotonic_ns() if SPANS.is_on else 0
        try:
            result = call()
        except RuntimeError:
            self._say_failure()
            raise
        finally:
            self.is_awaited = False
            self._recorder.note_progress()
            if phases is not None and before is not None:
                phases.end_wait(before)
        if since:
            self._trace(since, time.monotonic_ns(), is_end=is_end)
        return result

    def _trace(self, since: int, until: int, *, is_end: bool) -> None:
        """Note that the program has stood still for it meanwhile, and when it ended."""
        label = self.label
        if is_end:
            about = {
                "op": label.op,
                "what": label.what,
                "bytes": label.nbytes,
                "key": f"{label.lane}/{label.number}/{label.axis}/{label.turn}",
                "optimizer step": label.step,
            }
            SPANS.add("communication", str(label), int(self.began * 1e9), until, **about)
        SPANS.add("wait", f"wait for {label}", since, until, op=label.op, what=label.what)

    def _say_failure(self) -> None:
        self._is_over = True
        waited_s = time.monotonic() - self.began
        print(
            (
                f"dslaunch: rank {dist.get_rank()}: {self.label} (step {self.label.step}) failed "
                f"after {waited_s:.1f} s:"
            ),
            file=sys.stderr,
            flush=True,
        )


def _is_captured() -> bool:
    """Whether this thread captures a CUDA graph, which would break if it asked for events."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_RECORDERS: list[weakref.ref[FlightRecorder]] = []  # recorders of this process, one for each engine


class FlightRecorder:
    """Numbers the collectives of one engine and remembers the last ones. Another thread may read it."""

    def __init__(self) -> None:
        self.step = 1  # the optimizer step that is being made
        self.quiet_since = time.monotonic()  # when a collective last began or was waited for
        self.phases: Phases | None = None  # these count the time to wait for a collective
        self.tell_hang: Callable[[str], None] | None = None  # gets the report of a hang, too
        # gets the seconds for which this rank has stood in one collective
        self.tell_wait: Callable[[float], None] | None = None
        self._issued = [0] * NUM_LANES
        self._turns: dict[Line, int] = {}
        self._recent: deque[Collective] = deque(maxlen=_NUM_RECENT)
        self._under_way: deque[Flight] = deque()
        _RECORDERS[:] = [one for one in _RECORDERS if one() is not None] + [weakref.ref(self)]

    def begin(
        self,
        op: str,
        what: str,
        *,
        nbytes: int,
        lane: int,
        line: Line = Line(),  # noqa: B008  (it cannot change)
        stopwatch: Stopwatch | None = None,
    ) -> Flight:
        """Note a collective that is about to be sent."""
        self._issued[lane] += 1
        turn = 0
        if line.ranks:
            turn = self._turns[line] = self._turns.get(line, 0) + 1
        label = Collective(lane, self._issued[lane], self.step, op, what, nbytes, *line, turn)
        flight = Flight(label, self, stopwatch)
        self._recent.append(flight.label)
        while self._under_way and self._under_way[0].is_over:
            self._under_way.popleft()
        self._under_way.append(flight)
        self.quiet_since = flight.began
        return flight

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Inside, the program stands still until the GPU has done what it was told. Of the collectives under
        way the oldest is what it waits for.
        """
        oldest = next(iter(self.under_way()), None)
        if oldest is not None:
            oldest.is_awaited = True
        try:
            since = time.monotonic_ns() if SPANS.is_on else 0
            yield
            if since:
                SPANS.add("device", "wait for the GPU", since)
        finally:
            if oldest is not None:
                oldest.is_awaited = False
            self.note_progress()

    def note_progress(self) -> None:
        """The program goes on after a collective."""
        self.quiet_since = time.monotonic()

    @property
    def issued(self) -> tuple[int, ...]:
        """Number of collectives so far, by lane."""
        return tuple(self._issued)

    @property
    def turns(self) -> tuple[Turns, ...]:
        """Number of collectives so far, by the line of ranks."""
        return tuple(Turns(*line, number) for line, number in tuple(self._turns.items()))

    def remember(self, num_recent: int) -> None:
        """Keep so many of the last collectives."""
        self._recent = deque(self._recent, maxlen=num_recent)

    def recent(self) -> tuple[Collective, ...]:
        """The last ones, the oldest first."""
        return tuple(self._recent)

    def under_way(self) -> tuple[Flight, ...]:
        """Collectives that have not come to their end, the oldest first. Where a backend does not tell the
        end, it is known when the program stands still for it.
        """
        return tuple(
            flight
            for flight in tuple(self._under_way)
            if not flight.is_over and (flight.is_awaited or flight.tells_its_end)
        )

    def awaited_elsewhere(self) -> Collective | None:
        """The collective that another engine of this process waits for, if one does."""
        others = (one() for one in tuple(_RECORDERS))
        flights = (one for other in others if other and other is not self for one in other.under_way())
        return next((one.label for one in flights if one.is_awaited), None)

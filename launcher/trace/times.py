"""The parts of the time of a rank's steps.

Kinds of time
-------------
On a GPU the kernels count: compute are those that are not NCCL's, the optimizer those that were started in
`engine.step()`, communication NCCL's. Communication is hidden while a kernel that computes runs, and exposed
otherwise. The rest of a step is idle: the GPU has nothing to do. Data is the time that the program took to
get its data; where that is not hidden it is a part of idle.

On a CPU the program's thread counts: it does one thing at a time, and exposed time is time that it waits.
Communication goes from its start to the moment at which the program has its result. A moment of several kinds
is the first of: waiting for other ranks, waiting for a disk, checkpoint, optimizer, forward and backward,
data. The rest is idle: the program does something else.
Units: seconds, means of the steps that were traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ...shared import marks
from .intervals import Runs, common, length, union, without
from .rank_trace import GPU_COPIES, GPU_RANGE, KERNEL, OPERATOR, RANGE, RankTrace, Slice

MAX_NAMED = 10
_MAX_KEPT = 200  # operators per rank; the mean over ranks needs those, too, that are long on other ranks only
_TORCH_OPTIMIZER = "Optimizer.step#"  # torch's own ranges, in a program without our engine
_TORCH_LOADER = "enumerate(DataLoader)"
_TORCH_SENDS = ("gloo:", "nccl:", "mpi:", "ucc:")


class NamedTime(NamedTuple):
    """A named part of a step, and its time."""

    name: str
    s: float
    times: float


class RankTimes(NamedTuple):
    """None is an unknown value."""

    rank: int
    host: str
    on: str  # "gpu" or "cpu"
    steps: list[int]
    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    optimizer_s: float | None
    data_s: float | None
    disk_s: float
    checkpoint_s: float
    idle_s: float
    exposed: list[NamedTime]  # the longest first
    operators: list[NamedTime]  # by own time

    @property
    def hidden(self) -> float | None:
        """Part of communication that costs no time; None if there is none."""
        return 1.0 - self.exposed_s / self.communication_s if self.communication_s > 0 else None

    def as_json(self) -> dict[str, Any]:
        given = self._asdict()
        for name in ("exposed", "operators"):
            given[name] = [list(one) for one in given[name]]
        return given

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> RankTimes:
        """Read it. Errors: TypeError or ValueError for another form"""
        for name in ("exposed", "operators"):
            given = {**given, name: [NamedTime(*one) for one in given[name]]}
        return cls(**given)


def times_of(trace: RankTrace) -> RankTimes | None:
    """Return the times; None if there is no whole step."""
    if not trace.steps:
        return None
    return (_gpu_times if trace.has_gpu else _cpu_times)(trace)


class _Window:
    """The moments of all traced steps."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        self.runs = union((one.began, one.ended) for one in trace.steps)
        self.num_steps = len(trace.steps)

    def spans(self, *kinds: str) -> Runs:
        """Return our spans of the program's thread."""
        main = self._trace.main_thread
        return self.clip(one for one in self._trace.spans if one.kind in kinds and one.thread == main)

    def torch(self, is_meant: Callable[[Slice], bool]) -> Runs:
        return self.clip(one for one in self._trace.torch if is_meant(one))

    def clip(self, slices: Iterable[Slice]) -> Runs:
        return common(union((one.began, one.ended) for one in slices), self.runs)

    def s(self, runs: Runs) -> float:
        """Return a step's part, in seconds."""
        return length(runs) / self.num_steps / 1e9


def _cpu_times(trace: RankTrace) -> RankTimes:
    window = _Window(trace)
    has_engine = any(one.kind in ("forward", "optimizer") for one in trace.spans)
    wait, disk, checkpoint = window.spans("wait"), window.spans("disk wait"), window.spans("checkpoint")
    sent = window.clip(one for one in trace.spans if one.kind == "communication")
    optimizer, compute = window.spans("optimizer"), window.spans("forward", "backward")
    data = without(window.spans("data"), window.spans("evaluation"))
    if not has_engine:
        sent = union([*sent, *window.torch(lambda one: one.name.startswith(_TORCH_SENDS))])
        optimizer = window.torch(lambda one: one.kind == RANGE and one.name.startswith(_TORCH_OPTIMIZER))
        data = window.torch(lambda one: one.kind == RANGE and one.name.startswith(_TORCH_LOADER))
        compute = window.torch(lambda one: one.kind == OPERATOR and not one.name.startswith("c10d::"))
        wait = union([*wait, *without(sent, union([*compute, *optimizer]))])
    taken: Runs = []
    parts: list[Runs] = []
    for runs in (wait, disk, checkpoint, optimizer, compute, data):
        parts.append(without(runs, taken))
        taken = union([*taken, *runs])
    wait, disk, checkpoint, optimizer, compute, data = parts
    is_known = has_engine or bool(optimizer)
    return RankTimes(
        rank=trace.rank,
        host=trace.host,
        on="cpu",
        steps=[one.number for one in trace.steps],
        step_s=window.s(window.runs),
        compute_s=window.s(compute),
        communication_s=window.s(union([*sent, *wait])),
        exposed_s=window.s(wait),
        optimizer_s=window.s(optimizer) if is_known else None,
        data_s=window.s(data) if has_engine or data else None,
        disk_s=window.s(disk),
        checkpoint_s=window.s(checkpoint),
        idle_s=window.s(without(window.runs, taken)),
        exposed=_longest(_waits(trace, window), window),
        operators=_longest(_own_times(trace, window), window),
    )


def _gpu_times(trace: RankTrace) -> RankTimes:
    window = _Window(trace)
    kernels = [one for one in trace.torch if one.kind == KERNEL]
    ranges = [one for one in trace.torch if one.kind == GPU_RANGE]
    by_stream: dict[tuple[int, int], list[Slice]] = {}
    for one in ranges:
        if one.name.startswith(marks.SPAN) and one.name != f"{marks.SPAN}optimizer":
            by_stream.setdefault((one.device, one.thread), []).append(one)
    sends = [one for one in kernels if _is_sent(one)]
    works = window.clip(one for one in kernels if not _is_sent(one))
    copies = window.torch(lambda one: one.kind in GPU_COPIES)
    sent = window.clip(sends)
    exposed = without(sent, works)
    steps = window.clip(
        one for one in ranges if one.name == f"{marks.SPAN}optimizer" or one.name.startswith(_TORCH_OPTIMIZER)
    )
    optimizer = common(works, steps)
    loads = window.torch(lambda one: one.kind == RANGE and one.name.startswith(_TORCH_LOADER))
    data = without(window.spans("data"), window.spans("evaluation")) or loads
    has_engine = any(one.kind == "forward" for one in trace.spans)
    return RankTimes(
        rank=trace.rank,
        host=trace.host,
        on="gpu",
        steps=[one.number for one in trace.steps],
        step_s=window.s(window.runs),
        compute_s=window.s(without(works, steps)),
        communication_s=window.s(sent),
        exposed_s=window.s(exposed),
        optimizer_s=window.s(optimizer) if steps else None,
        data_s=window.s(data) if has_engine or data else None,
        disk_s=window.s(window.spans("disk wait")),
        checkpoint_s=window.s(window.spans("checkpoint")),
        idle_s=window.s(without(window.runs, union([*works, *sent, *copies]))),
        exposed=_longest(
            (
                (
                    _named_by(one, by_stream.get((one.device, one.thread), ())),
                    length(without(window.clip([one]), works)),
                )
                for one in sends
            ),
            window,
        ),
        operators=_longest(((one.name, length(window.clip([one]))) for one in kernels), window),
    )


def _is_sent(kernel: Slice) -> bool:
    return kernel.name.lower().startswith("nccl")


def _named_by(kernel: Slice, ranges: Sequence[Slice]) -> str:
    """Return the name of our range in its stream that is around its start."""
    around = (one for one in ranges if one.began <= kernel.began < one.ended)
    found = next(around, None)
    return kernel.name if found is None else found.name.removeprefix(marks.SPAN)


def _waits(trace: RankTrace, window: _Window) -> Iterator[tuple[str, int]]:
    for one in trace.spans:
        if one.kind in ("wait", "disk wait") and one.thread == trace.main_thread:
            yield one.name.removeprefix("wait for "), length(window.clip([one]))


def _own_times(trace: RankTrace, window: _Window) -> Iterator[tuple[str, int]]:
    """Yield each operator's time without those that it called."""
    by_thread: dict[int, list[Slice]] = {}
    for one in trace.torch:
        if one.kind == OPERATOR:
            by_thread.setdefault(one.thread, []).append(one)
    for slices in by_thread.values():
        slices.sort(key=lambda one: (one.began, -one.ended))
        inner: list[tuple[Slice, Runs]] = []  # those under way, with what they called
        done: list[tuple[Slice, Runs]] = []
        for one in slices:
            while inner and inner[-1][0].ended <= one.began:
                done.append(inner.pop())
            if inner:
                inner[-1][1].append((one.began, min(one.ended, inner[-1][0].ended)))
            inner.append((one, []))
        for one, called in (*done, *inner):
            yield one.name, length(without(window.clip([one]), union(called)))


def _longest(found: Iterable[tuple[str, int]], window: _Window) -> list[NamedTime]:
    """Return the longest, those of one name together."""
    sums: dict[str, list[int]] = {}
    for name, took in found:
        if took > 0:
            sums.setdefault(name, []).append(took)
    named = [
        NamedTime(name, sum(each) / window.num_steps / 1e9, len(each) / window.num_steps)
        for name, each in sums.items()
    ]
    return sorted(named, key=lambda one: (-one.s, one.name))[:_MAX_KEPT]

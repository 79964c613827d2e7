"""One rank's files about its steps, with all times on the launcher's clock.

runtime/tracing/tracer.py describes the files. They come from another machine, so nothing in them is taken for
granted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..sync.host_clock import HostClock
from .intervals import union, without

KINDS = (
    *("forward", "backward", "optimizer", "data", "evaluation", "checkpoint", "unit", "update"),
    *("communication", "wait", "device", "disk", "disk wait", "copy"),
)
# Kinds of torch's events that are kept; of the others Perfetto shows nothing.
OPERATOR, RANGE, KERNEL, GPU_RANGE = "cpu_op", "user_annotation", "kernel", "gpu_user_annotation"
GPU_COPIES = ("gpu_memcpy", "gpu_memset")
_TORCH_KINDS = {OPERATOR, RANGE, KERNEL, GPU_RANGE, *GPU_COPIES, "cuda_runtime", "cuda_driver"}


class Slice(NamedTuple):
    """Work that took time. Units: nanoseconds of the launcher's monotonic clock."""

    kind: str
    name: str
    began: int
    ended: int
    thread: int  # a thread of the host, or a GPU's stream
    args: dict[str, Any]
    device: int = -1  # a GPU


class Step(NamedTuple):
    number: int
    began: int
    ended: int


class RankTrace(NamedTuple):
    """`problems` are sentences on missing parts."""

    rank: int
    host: str
    main_thread: int
    steps: tuple[Step, ...]
    spans: tuple[Slice, ...]
    torch: tuple[Slice, ...]
    arrows: tuple[dict[str, Any], ...]  # torch's: from a forward to its backward, from a call to its kernel
    clock_error_s: float
    problems: tuple[str, ...]

    @property
    def has_gpu(self) -> bool:
        return any(one.kind == KERNEL for one in self.torch)


def spans_name(rank: int) -> str:
    """Return the name of the file in which a rank notes its work."""
    return f"trace-{rank}.spans"


def read_rank(
    folder: Path,
    *,
    rank: int,
    host: str,
    clock: HostClock,
    wanted: tuple[int, int],
    how_it_ended: str = "",
    was_brought: bool = True,
) -> RankTrace:
    """Read the rank's files in the folder, if there are any. `how_it_ended` describes the end of a rank that
    failed, or was stopped because another one did. `was_brought` is false if they could not be written here.
    """
    nothing = RankTrace(rank, host, 0, (), (), (), (), 0.0, ())
    try:
        lines = _lines(folder / spans_name(rank))
        head = next(lines)
        thread, clocks = _whole(head["thread"]), _clocks(head)
    except FileNotFoundError:
        if not was_brought:
            return nothing._replace(problems=("what it has written was not brought",))
        hint = "does its program train with dslaunch.initialize(), or call dslaunch.report(step=...)?"
        why = f": {how_it_ended}" if how_it_ended else f"; {hint}"
        return nothing._replace(problems=(f"it has written nothing{why}",))
    except OSError as error:
        return nothing._replace(problems=(f"its trace cannot be read: {error.strerror}",))
    except (StopIteration, LookupError, TypeError, ValueError):
        return nothing._replace(problems=("its trace is cut off before its first line ends",))
    offset = clock.offset_at(clocks[0] / 1e9)
    if offset is None:
        return nothing._replace(problems=("how far its host's clock is from this one's is not known",))
    reading = _Reading(shift=round(offset.seconds * 1e9))
    reading.read(lines)
    reading.look_for_missing(wanted, how_it_ended)
    error_s = offset.error_s
    slices: tuple[Slice, ...] = ()
    arrows: tuple[dict[str, Any], ...] = ()
    profile = folder / f"trace-{rank}.torch.json"
    if profile.exists():
        epoch, epoch_error = _epoch(clocks, reading.end)
        error_s += epoch_error / 1e9
        try:
            slices, arrows = _torch(profile, lambda at: at - epoch + reading.shift)
        except (OSError, ValueError, LookupError, TypeError) as error:
            reading.problems.append(f"torch's profile cannot be read: {error}")
    elif reading.steps and not reading.end.get("problem"):
        reading.problems.append("torch's operators are missing: the rank ended before it wrote them")
    return RankTrace(
        rank=rank,
        host=host,
        main_thread=thread,
        steps=tuple(reading.steps),
        spans=tuple(reading.spans),
        torch=slices,
        arrows=arrows,
        clock_error_s=error_s,
        problems=tuple(reading.problems),
    )


class _Reading:
    """The lines after the first one."""

    def __init__(self, *, shift: int) -> None:
        """`shift`: from the host's clock to ours, in nanoseconds."""
        self.shift = shift
        self.steps: list[Step] = []
        self.spans: list[Slice] = []
        self.end: dict[str, Any] = {}  # the last line, if it is there
        self.problems: list[str] = []

    def read(self, lines: Iterator[dict[str, Any]]) -> None:
        try:
            for line in lines:
                if "end" in line:
                    self.end = line
                    break
                began, ended = _whole(line["began"]) + self.shift, _whole(line["ended"]) + self.shift
                spans = [_span(one, self.shift) for one in line["spans"]]
                self.steps.append(Step(_whole(line["step"]), began, ended))
                self.spans += spans
        except (LookupError, TypeError, ValueError) as error:
            self.problems.append(
                f"a line of its trace cannot be read, and what follows it is left out ({error})"
            )

    def look_for_missing(self, wanted: tuple[int, int], how_it_ended: str) -> None:
        first, last = wanted
        there = union((one.number, one.number + 1) for one in self.steps)
        missing = without([(first, last + 1)], there)  # runs, for the range may be of any length
        if missing:
            end = str(self.end.get("end") or "it was ended in the middle")
            if end == "whole" and self.steps:  # the program began, or went on after a checkpoint, behind them
                end = f"step {self.steps[0].number} was the first that could be traced"
            why = how_it_ended or end
            word = "step" if [end - begin for begin, end in missing] == [1] else "steps"
            runs = ",".join(f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in missing)
            self.problems.append(f"without {word} {runs}: {why}")
        if self.end.get("problem"):
            self.problems.append(str(self.end["problem"]))
        if self.end.get("num_dropped"):
            self.problems.append(f"{self.end['num_dropped']} spans more were not kept")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in it; a last line that was cut off is none."""
    text = path.read_bytes()

    def objects() -> Iterator[dict[str, Any]]:
        for line in text.split(b"\n")[:-1]:
            found = json.loads(line)
            if not isinstance(found, dict):
                raise ValueError("a line is no object")
            yield found

    return objects()


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{str(value)[:40]!r} is no whole number")
    return value


def _clocks(line: dict[str, Any]) -> tuple[int, int, int]:
    monotonic, epoch, apart = line["clock"]
    return _whole(monotonic), _whole(epoch), _whole(apart)


def _epoch(first: tuple[int, int, int], end: dict[str, Any]) -> tuple[int, int]:
    """Return the system's time minus the monotonic clock, and its possible error: the system's time may have
    been set while the trace was made.
    """
    last = _clocks(end) if "clock" in end else first
    apart = [one[1] - one[0] for one in (first, last)]
    return sum(apart) // 2, abs(apart[0] - apart[1]) // 2 + max(first[2], last[2])


def _span(given: Any, shift: int) -> Slice:
    kind, name, began, ended, thread, *more = given
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of span")
    args = more[0] if more and isinstance(more[0], dict) else {}
    return Slice(kind, str(name), _whole(began) + shift, _whole(ended) + shift, _whole(thread), args)


def _torch(path: Path, convert: Callable[[int], int]) -> tuple[tuple[Slice, ...], tuple[dict[str, Any], ...]]:
    """Return torch's slices, and its arrows with `ts` in our nanoseconds."""
    with path.open("rb") as file:
        given = json.load(file)
    base = int(given.get("baseTimeNanoseconds", 0))

    def at(microseconds: float) -> int:
        return convert(base + round(microseconds * 1000))

    slices, arrows = [], []
    for event in given["traceEvents"]:
        kind = event.get("cat")
        if event.get("ph") == "X" and kind in _TORCH_KINDS:
            began = at(event["ts"])
            is_on_gpu = kind in (KERNEL, GPU_RANGE, *GPU_COPIES)
            slices.append(
                Slice(
                    kind,
                    str(event["name"]),
                    began,
                    began + max(0, round(event.get("dur", 0) * 1000)),
                    int(event["tid"]),
                    event.get("args") or {},
                    int(event["pid"]) if is_on_gpu else -1,
                )
            )
        elif event.get("ph") in ("s", "f") and isinstance(event.get("id"), int):
            arrows.append({**event, "ts": at(event["ts"])})
    return tuple(slices), tuple(arrows)

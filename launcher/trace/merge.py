"""Many ranks' traces as one file that Perfetto and chrome://tracing open.

The format is Chrome's: JSON, in which each rank is a process with rows (threads) of its own. Slices that
overlap cannot be in one row, so overlapping work has as many rows as it needs. `dslaunch trace` prints the
first line of the file.

Source: the "Trace Event Format" document of the Chromium project
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ...shared import marks
from ..errors import LaunchError
from ..inputs.named_file import open_named
from ..node.system.plain_file import open_plain
from .rank_trace import RANGE, RankTrace, Slice

MAX_TORCH_EVENTS = 400_000  # events per rank; more make Perfetto slow
_TOLD_EACH = 10_000  # events
HEAD = "dslaunch"
# First rows; the slices on the program's own row are nested, as the program is.
_PROGRAM, _UNDER_WAY, _DISK, _OTHERS, _THREADS, _STREAMS = 1, 10, 40, 70, 1000, 100_000
_BESIDE, _MAX_BESIDE = 10_000_000, 30
_UNDER_WAY_KINDS = {"communication": _UNDER_WAY, "disk": _DISK}
_TITLES = {_UNDER_WAY: "communication", _DISK: "disk"}

Event = dict[str, Any]


class Merged(NamedTuple):
    """The result of a merge."""

    num_events: int
    num_bytes: int
    notes: tuple[tuple[int, str], ...]  # missing parts, by rank


def write_merged(
    path: str, traces: Sequence[RankTrace], head: dict[str, Any], *, told: Callable[[int], None]
) -> Merged:
    """Write the file, whole or not at all. `told` gets the number of events so far, once in a while.

    Errors: LaunchError if it cannot be written
    """
    part = f"{path}.part"
    notes: list[tuple[int, str]] = []
    num_events = 0
    try:
        with contextlib.suppress(FileNotFoundError):  # left by a job that was killed
            os.unlink(part)
        fd = open_plain(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(fd, "wb") as raw, _opened(raw, path) as file:
            first = json.dumps(head, ensure_ascii=True)
            file.write(f'{{"{HEAD}":{first},"displayTimeUnit":"ms","traceEvents":[\n'.encode())
            for event in events_of(traces, notes):
                file.write(
                    (b",\n" if num_events else b"") + json.dumps(event, separators=(",", ":")).encode()
                )
                num_events += 1
                if num_events % _TOLD_EACH == 0:
                    told(num_events)
            file.write(b"\n]}\n")
        size = os.path.getsize(part)
        os.replace(part, path)
    except OSError as error:
        raise LaunchError(
            f"--trace: {path}: {error.strerror}; give --trace_to a file that you can write"
        ) from None
    finally:
        with contextlib.suppress(OSError):  # it is there if writing failed, or a signal ended it
            os.unlink(part)
    return Merged(num_events, size, tuple(notes))


def _opened(raw: IO[bytes], path: str) -> AbstractContextManager[IO[bytes]]:
    if not path.endswith(".gz"):
        return nullcontext(raw)
    return cast("AbstractContextManager[IO[bytes]]", gzip.GzipFile("", "wb", 6, raw, mtime=0))


def read_head(path: str) -> dict[str, Any]:
    """Return the content of the first line.

    Errors: LaunchError if it is no such file
    """
    try:
        with open(open_named(Path(path)), "rb") as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if is_packed else raw as file:
                line = file.readline(64 << 20)
    except (OSError, EOFError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LaunchError(f"{path}: {why}; give a file that dslaunch --trace has written") from None
    begin, end = f'{{"{HEAD}":'.encode(), b',"displayTimeUnit":"ms","traceEvents":[\n'
    try:
        if not (line.startswith(begin) and line.endswith(end)):
            raise ValueError
        found = json.loads(line[len(begin) : -len(end)])
        if not isinstance(found, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise not_ours(path) from None
    return found


def not_ours(path: str) -> LaunchError:
    """Return the error for a file that --trace has not written."""
    return LaunchError(f"{path} is no trace of dslaunch's; give a file that dslaunch --trace has written")


def events_of(traces: Sequence[RankTrace], notes: list[tuple[int, str]]) -> Iterator[Event]:
    """Yield all events; missing parts are added to `notes`."""
    begun = chain(
        (one.began for trace in traces for one in trace.steps),
        (one.began for trace in traces for one in chain(trace.spans, trace.torch)),
    )
    base = min(begun, default=0)
    flows = _Flows()
    for place, trace in enumerate(sorted(traces, key=lambda one: one.rank)):
        if trace.steps or trace.spans or trace.torch:
            yield from _Process(trace, base, place, flows).events(notes)
    yield from flows.events()


class _Process:
    """One rank."""

    def __init__(self, trace: RankTrace, base: int, place: int, flows: _Flows) -> None:
        self._trace, self._base, self._place, self._flows = trace, base, place, flows
        self._titles: dict[int, str] = {}  # titles of rows
        self._threads: dict[int, int] = {}  # rows of torch's, by thread

    def events(self, notes: list[tuple[int, str]]) -> Iterator[Event]:
        trace = self._trace
        yield self._about("process_name", 0, name=f"{trace.host}: rank {trace.rank}")
        yield self._about("process_sort_index", 0, sort_index=self._place)
        self._titles[_PROGRAM] = "dslaunch"
        for step in trace.steps:
            yield self._slice(Slice("step", f"step {step.number}", step.began, step.ended, 0, {}), _PROGRAM)
        yield from self._own()
        yield from self._under_way()
        yield from self._torch(notes)
        for row, title in sorted(self._titles.items()):
            yield self._about("thread_name", row, name=title)
            yield self._about("thread_sort_index", row, sort_index=row)

    def _own(self) -> Iterator[Event]:
        """Yield the events of the program's thread, and of other threads."""
        trace = self._trace
        others = sorted({one.thread for one in trace.spans} - {trace.main_thread})
        rows = {trace.main_thread: _PROGRAM} | {one: _OTHERS + i for i, one in enumerate(others)}
        for one in trace.spans:
            if one.kind not in _UNDER_WAY_KINDS:
                row = rows[one.thread]
                self._titles.setdefault(row, f"dslaunch, thread {one.thread}")
                yield self._slice(one, row)

    def _under_way(self) -> Iterator[Event]:
        for kind, first in _UNDER_WAY_KINDS.items():
            free_at: list[int] = []  # by row
            found = (one for one in self._trace.spans if one.kind == kind)
            for one in sorted(found, key=lambda one: (one.began, -one.ended)):
                place = next((i for i, at in enumerate(free_at) if at <= one.began), len(free_at))
                if place == len(free_at):
                    free_at.append(0)
                free_at[place] = one.ended
                row = first + min(place, _DISK - _UNDER_WAY - 1)
                self._titles.setdefault(row, _TITLES[first] if not place else f"{_TITLES[first]} {place + 1}")
                event = self._slice(one, row)
                self._flows.add(one, event)
                yield event

    def _torch(self, notes: list[tuple[int, str]]) -> Iterator[Event]:
        trace = self._trace
        # Skip torch's copy of our own ranges, except on a GPU.
        slices = [one for one in trace.torch if not (one.kind == RANGE and one.name.startswith(marks.SPAN))]
        kept_ids: set[int] | None = None
        if len(slices) > MAX_TORCH_EVENTS:
            by_length = sorted(slices, key=lambda one: one.began - one.ended)
            shortest = by_length[MAX_TORCH_EVENTS - 1]
            longest_us = (shortest.ended - shortest.began) / 1e3
            note = (
                f"{len(slices) - MAX_TORCH_EVENTS} of {len(slices)} events of torch's are not in the file, "
                f"the shortest, none of more than {longest_us:.1f} us"
            )
            notes.append((trace.rank, note))
            slices = by_length[:MAX_TORCH_EVENTS]
            kept_ids = set()
        yield from self._nested(slices)
        if kept_ids is not None:
            return  # an arrow to a slice that was left out would be drawn to a wrong one
        for arrow in trace.arrows:
            thread, device = arrow.get("tid"), arrow.get("pid")
            if not isinstance(thread, int) or not isinstance(device, int):
                continue
            row = self._threads.get(thread, _STREAMS + thread)
            if row not in self._titles:
                continue
            begun = {} if arrow["ph"] == "s" else {"bp": "e"}
            yield {
                "ph": arrow["ph"],
                "cat": str(arrow.get("cat")),
                "name": str(arrow.get("name")),
                "id": trace.rank * 10**9 + arrow["id"] % 10**9,
                "ts": self._ts(arrow["ts"]),
                "pid": trace.rank,
                "tid": row,
                **begun,
            }

    def _nested(self, slices: Sequence[Slice]) -> Iterator[Event]:
        """Yield each slice in the row of its thread or stream. One that is not nested there has a row beside
        it, such as gloo's messages, which torch notes for the thread that sent them.
        """
        under_way: dict[int, list[int]] = {}  # by row: when these end, the innermost last
        for one in sorted(slices, key=lambda one: (one.began, -one.ended)):
            row = self._row_of(one)
            yield self._slice(one, self._fitting(one, row, under_way))

    def _fitting(self, one: Slice, row: int, under_way: dict[int, list[int]]) -> int:
        """Return that row, or the first one beside it in which it is nested."""
        beside, place = row, 0
        while True:
            ends = under_way.setdefault(beside, [])
            while ends and ends[-1] <= one.began:
                ends.pop()
            if not ends or one.ended <= ends[-1] or place == _MAX_BESIDE:
                break
            place += 1
            beside = _BESIDE + row * _MAX_BESIDE + place
        ends.append(one.ended)
        if place:
            self._titles.setdefault(beside, f"{self._titles[row]}, beside {place}")
        return beside

    def _row_of(self, one: Slice) -> int:
        if one.device >= 0:
            row = _STREAMS + one.thread
            self._titles.setdefault(row, f"GPU, stream {one.thread}")
            return row
        row = self._threads.setdefault(one.thread, _THREADS + len(self._threads))
        is_main = one.thread == self._trace.main_thread
        self._titles.setdefault(row, "program (torch)" if is_main else f"torch, thread {one.thread}")
        return row

    def _slice(self, one: Slice, row: int) -> Event:
        event: Event = {
            "ph": "X",
            "cat": one.kind,
            "name": one.name,
            "ts": self._ts(one.began),
            "dur": round((one.ended - one.began) / 1e3, 3),
            "pid": self._trace.rank,
            "tid": row,
        }
        if one.args:
            event["args"] = one.args
        return event

    def _about(self, what: str, row: int, **args: Any) -> Event:
        return {"ph": "M", "name": what, "ts": 0, "pid": self._trace.rank, "tid": row, "args": args}

    def _ts(self, at: int) -> float:
        return round((at - self._base) / 1e3, 3)


class _Flows:
    """Arrows between the ranks of one collective, from the one that came first to the one that came last."""

    def __init__(self) -> None:
        self._of_key: dict[tuple[Any, ...], list[Event]] = {}

    def add(self, one: Slice, event: Event) -> None:
        args = one.args
        if one.kind == "communication" and isinstance(args.get("key"), str):
            key = (args["key"], str(args.get("op")), str(args.get("what")), str(args.get("optimizer step")))
            self._of_key.setdefault(key, []).append(event)

    def events(self) -> Iterable[Event]:
        number = 0
        for found in self._of_key.values():
            if len({one["pid"] for one in found}) < 2 or len({one["pid"] for one in found}) < len(found):
                continue  # one rank's, or of several engines in one process
            number += 1
            found.sort(key=lambda one: one["ts"])
            for place, one in enumerate(found):
                ph = "s" if not place else "f" if place == len(found) - 1 else "t"
                yield {
                    "ph": ph,
                    "cat": "collective",
                    "name": one["name"],
                    "id": 10**15 + number,
                    "ts": one["ts"],
                    "pid": one["pid"],
                    "tid": one["tid"],
                    **({} if ph == "s" else {"bp": "e"}),
                }

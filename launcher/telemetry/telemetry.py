"""The events of one job: docs/design/events.md has their kinds and keys."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..inputs.line_prefix import Origin
from ..node.observe.metrics import FOLDED, merge
from ..options.end import without_secrets
from ..run_state.run_state import RunState
from ..wire.frames import Metrics, Told

METRICS = "metrics"
_OPENING = ("job", "attempt", "config")  # a file that begins later needs these first
_LATE_S = 0.3  # part of an interval: hosts report at different times, and one event has them all
_NO_EVENT = ("links", "places")  # long, and only for the comparison of hosts


class Event(dict[str, Any]):
    """One event, which is never changed. It becomes a line once, however many files it goes to."""

    @cached_property
    def line(self) -> bytes:
        return _as_line(self)


class EventSink(Protocol):
    """A destination of events."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event. Called by one thread at a time; it neither raises nor takes long."""
        ...

    def close(self) -> None:
        """End after the last event: the rest is written."""
        ...


class StateSink:
    def __init__(self, state: RunState) -> None:
        self.take = state.take

    def close(self) -> None:
        """Do nothing: it has no file."""


class Telemetry:
    """Makes the events and hands them on. No method raises: a sink that does gets no more events, and
    `on_problem` is told so. `state` is the state of the run by all of them; other threads read it under
    `lock`.

    Times are given on the monotonic clock, and are events' on that of the wall.
    """

    def __init__(self) -> None:
        self.on_problem: Callable[[str], None] = lambda problem: None
        self._interval_s = 1.0
        self.state = RunState()
        self.lock = threading.RLock()
        self._sinks: list[EventSink] = [StateSink(self.state)]
        self._opening: dict[tuple[str, Any], Mapping[str, Any]] = {}
        self._attempt = -1
        self._lines: dict[int, int] = {}  # lines of output by rank, since the last time
        self._ranks: dict[str, dict[str, Any]] = {}
        self._hosts: dict[str, dict[str, Any]] = {}
        self._next_at = 0.0

    def begin(self, job: Mapping[str, Any], *, interval_s: float) -> None:
        """Begin a job. `interval_s` is the interval of numbers; 0: there are none, but lines are counted."""
        self._interval_s = interval_s or 1.0
        self.record("job", **job)

    @property
    def opening(self) -> list[Mapping[str, Any]]:
        """Return the events that a file beginning now needs first."""
        with self.lock:
            return list(self._opening.values())

    def add(self, sink: EventSink) -> None:
        """Add a sink. It gets all events from now on, and first those that they refer to."""
        with self.lock:
            self._sinks.append(sink)
            for event in self.opening:
                self._give(sink, event)

    def record(self, event: str, *, at_s: float | None = None, **keys: Any) -> None:
        """Record one event, now or at that time."""
        at = time.time() if at_s is None else time.time() - time.monotonic() + at_s
        made = Event(at=round(at, 3), event=event, **keys)
        with self.lock:
            if event in _OPENING:
                self._opening[event, keys.get("rank")] = made
            for sink in list(self._sinks):
                self._give(sink, made)

    def _give(self, sink: EventSink, event: Mapping[str, Any]) -> None:
        try:
            sink.take(event)
        except Exception as error:
            if sink in self._sinks:
                self._sinks.remove(sink)
                what, why = type(sink).__name__, f"{type(error).__name__}: {error}"
                self.on_problem(f"the job goes on without its {what}, which failed: {why}")

    def record_of_attempt(self, event: str, *, at_s: float | None = None, **keys: Any) -> None:
        """Record the same, with the number of the running attempt."""
        self.record(event, at_s=at_s, attempt=max(0, self._attempt), **keys)

    def begin_attempt(self, origins: tuple[Origin, ...], *, log_folder: Path | None = None) -> None:
        """Begin an attempt with these workers."""
        self.flush()
        self._attempt += 1
        for key in [one for one in self._opening if one[0] == "config"]:
            del self._opening[key]
        folder = "" if log_folder is None else str(log_folder.absolute())
        workers = [list(one) if one.role else list(one[:4]) for one in origins]
        self.record_of_attempt("attempt", workers=workers, log_folder=folder)

    def heard_output(self, rank: int, num_lines: int) -> None:
        """Count lines of a rank. May be called from any thread."""
        with self.lock:
            self._lines[rank] = self._lines.get(rank, 0) + num_lines

    def take_metrics(self, host: str, item: Metrics) -> None:
        """Take numbers of a host and its ranks."""
        with self.lock:
            for rank, row in item.ranks.items():
                if not isinstance(row, dict):
                    continue
                if rank == FOLDED:
                    self._ranks[f"{host} {FOLDED}"] = row
                else:
                    merge(self._ranks.setdefault(rank, {}), row)
            self._hosts[host] = {name: one for name, one in item.host.items() if name not in _NO_EVENT}

    def take_told(self, item: Told) -> None:
        """Take a long record of a rank."""
        try:
            told = json.loads(item.text)
        except (ValueError, RecursionError):
            return
        if item.name == "hang":
            self.record("hang", rank=item.rank, report=str(told))
        elif item.name == "config":
            self.record("config", rank=item.rank, config=told)
        elif item.name == "trial":
            self.record("trial", rank=item.rank, trial=told)

    def look(self, now: float) -> None:
        """Make an event of the reported numbers, if it is time."""
        if now < self._next_at:
            return
        if not (self._ranks or self._hosts or self._lines):
            return
        if self._next_at == 0.0:  # the first ones: wait for those of other hosts
            self._next_at = now + _LATE_S * self._interval_s
            return
        self._next_at = now + self._interval_s
        self.flush()

    def flush(self) -> None:
        """Do the same, now."""
        with self.lock:
            ranks, self._ranks = self._ranks, {}
            hosts, self._hosts = self._hosts, {}
            lines, self._lines = self._lines, {}
        if ranks or hosts or lines:
            shown = {str(rank): number for rank, number in lines.items()}
            self.record_of_attempt(METRICS, ranks=ranks, hosts=hosts, lines=shown)

    def close(self) -> None:
        """Close the sinks: there are no more events."""
        with self.lock:
            sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()


def describe_job(*, name: str, launcher: str) -> dict[str, Any]:
    """Return the keys of the event `job`, of this process."""
    from ... import __version__

    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        cwd = ""
    return {
        "name": name,
        "command": ["dslaunch", *without_secrets(sys.argv[1:])],
        "cwd": cwd,
        "user": _user(),
        "host": socket.gethostname(),
        "version": __version__,
        "launcher": launcher,
    }


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def as_line(event: Mapping[str, Any]) -> bytes:
    """Return an event as a line of a file."""
    return event.line if isinstance(event, Event) else _as_line(event)


def _as_line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode("ascii") + b"\n"

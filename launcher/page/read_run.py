"""A run from its files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..node.plain_file import read_plain
from ..run_state.values import mapping, number, text, whole_or
from ..wording import count
from .event_lines import EventLines
from .run import Attempt, Numbers, Run

MAX_NOTES = 600
MAX_REPORT_BYTES = 64 << 20
MAX_ATTEMPTS = 2000
MAX_TOLD = 200  # hangs, and questions for stacks
_FIRST_NOTES = 200
EVENTS, REPORT, LATEST = "events.jsonl", "report.json", "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a run is kept: files of its events in the order of time, and its report."""

    label: str
    events: tuple[Path, ...]
    report: Path | None = None
    state: str = ""


def find_source(word: str) -> Source | None:
    """The files of a run that is named by its folder, by the folder with all runs, or by a file; None if
    there is no such path.

    Errors: LaunchError for a path with neither events nor a report
    """
    path = Path(word)
    if path.is_dir():
        return source_in(path)
    if not path.exists():
        return None
    if not path.is_file():
        raise LaunchError(f"{word} is no regular file; give the folder of a run, or its {EVENTS}")
    if _is_report(path):
        return Source(label=_label(path), events=(), report=path)
    report = path.with_name(REPORT)
    has_report = path.name == EVENTS and report.is_file()
    return Source(label=_label(path), events=(path,), report=report if has_report else None)


def source_in(folder: Path) -> Source:
    """The run in this folder, or the latest one in it.

    Errors: LaunchError if there is none
    """
    for one in (folder, folder / LATEST):
        events, report = one / EVENTS, one / REPORT
        if events.is_file() or report.is_file():
            return Source(
                label=one.resolve().name,
                events=(events,) if events.is_file() else (),
                report=report if report.is_file() else None,
            )
    raise LaunchError(
        f"{folder}: there is no {EVENTS} and no {REPORT} in it, nor in {LATEST}; give the folder that "
        "--log_dir named, or one of its runs"
    )


def _label(path: Path) -> str:
    return path.resolve().parent.name if path.name in (EVENTS, REPORT) else path.stem


def _is_report(path: Path) -> bool:
    """Whether it is one JSON object without events: a report."""
    try:
        start = read_plain(str(path), max_bytes=4096).lstrip()
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {error.strerror}") from None
    if path.suffix == ".json" or start.startswith(b"{\n"):
        return b'"event"' not in start
    return False


def read_run(source: Source) -> Run:
    """All that these files say. What cannot be read of them is said in `problems`.

    Errors: LaunchError if nothing can be read
    """
    run = Run(label=source.label, state=source.state)
    lines = EventLines()
    reader = _Reader(run)
    for path in source.events:
        run.sources.append(str(path))
        for event in lines.read(path):
            reader.take(event)
    reader.finish()
    if source.report is not None:
        run.sources.append(str(source.report))
        _take_report(run, source.report, is_alone=not source.events)
    if not lines.num_events and run.report is None:
        raise LaunchError(
            f"{', '.join(run.sources)}: no event of a job is in it; give the {EVENTS} or the {REPORT} of "
            "a run"
        )
    if lines.is_cut:
        run.problems.append("The last line of the events has no end: the file was cut, or is being written.")
    if lines.num_bad:
        run.problems.append(f"{count(lines.num_bad, 'line')} of the events could not be read.")
    if reader.num_unknown:
        kinds = ", ".join(sorted(reader.unknown)[:5])
        run.problems.append(f"{count(reader.num_unknown, 'event')} of unknown kinds were left out ({kinds}).")
    if run.num_lost:
        run.problems.append(f"{count(run.num_lost, 'event')} could not be written when the job ran.")
    return run


class _Reader:
    """Takes events in their order."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._numbers = Numbers(run)
        self._attempt = -1
        self._last_notes: list[dict[str, Any]] = []
        self._seen_notes: set[tuple[float, str]] = set()
        self.num_unknown = 0
        self.unknown: set[str] = set()
        self._takers: dict[str, Callable[[dict[str, Any], float], None]] = {
            "job": self._job,
            "attempt": self._begin_attempt,
            "phase": self._phase,
            "started": self._started,
            "running": self._running,
            "metrics": self._metrics,
            "config": self._config,
            "hang": self._hang,
            "note": self._note,
            "stacks": self._stacks,
            "straggler": self._straggler,
            "straggler_over": self._straggler_over,
            "exited": self._exited,
            "verdict": self._verdict,
            "lost": self._lost,
            "end": self._end,
        }

    def take(self, event: dict[str, Any]) -> None:
        at = number(event.get("at"))
        taker = self._takers.get(event["event"])
        if taker is None:
            self.num_unknown += 1
            if len(self.unknown) < 20:
                self.unknown.add(event["event"][:40])
            return
        if at is not None and math.isfinite(at):
            self._run.began_at = self._run.began_at or at
            self._run.last_at = max(self._run.last_at, at)
        taker(event, at if at is not None and math.isfinite(at) else self._run.last_at)

    def finish(self) -> None:
        self._run.notes.extend(self._last_notes)

    def _of(self, event: dict[str, Any], at: float) -> Attempt:
        """The attempt that it speaks of."""
        told = whole_or(event.get("attempt"), self._attempt)
        known = self._run.attempts
        place = max(0, told)
        if place not in known and len(known) >= MAX_ATTEMPTS:
            place = max(known)
        attempt = known.setdefault(place, Attempt(number=place, began_at=at, last_at=at))
        attempt.last_at = max(attempt.last_at, at)
        return attempt

    def _job(self, event: dict[str, Any], at: float) -> None:
        if not self._run.job:
            self._run.job = event

    def _begin_attempt(self, event: dict[str, Any], at: float) -> None:
        attempt = self._of(event, at)
        if attempt.number == self._attempt:
            return  # a file of events that goes on begins with what it is about
        self._attempt = attempt.number
        self._numbers.begin_attempt()
        attempt.began_at = at
        attempt.log_folder = text(event.get("log_folder"))
        workers = event.get("workers")
        for one in workers if isinstance(workers, list) else ():
            if isinstance(one, list) and len(one) >= 3 and isinstance(one[0], str) and whole_or(one[2]) >= 0:
                attempt.host_of[whole_or(one[2])] = one[0]
        attempt.hosts = tuple(dict.fromkeys(attempt.host_of.values()))

    def _phase(self, event: dict[str, Any], at: float) -> None:
        name = text(event.get("phase"))
        attempt = self._of(event, at)
        if name and name != "ended" and len(attempt.phases) < 30:
            attempt.phases[name[:40]] = at

    def _started(self, event: dict[str, Any], at: float) -> None:
        attempt = self._of(event, at)
        rank, host = whole_or(event.get("rank")), text(event.get("host"))
        if rank >= 0 and host:
            attempt.host_of.setdefault(rank, host)

    def _running(self, event: dict[str, Any], at: float) -> None:
        attempt = self._of(event, at)
        attempt.running_at = attempt.running_at or at

    def _metrics(self, event: dict[str, Any], at: float) -> None:
        attempt = self._of(event, at)
        self._numbers.add(at - self._run.began_at, attempt.number, event)

    def _config(self, event: dict[str, Any], at: float) -> None:
        rank = whole_or(event.get("rank"))
        if rank in self._run.configs or len(self._run.configs) < 16:
            self._run.configs[rank] = event.get("config")

    def _hang(self, event: dict[str, Any], at: float) -> None:
        self._keep(self._run.hangs, event, at)

    def _stacks(self, event: dict[str, Any], at: float) -> None:
        self._keep(self._run.stacks, event, at)

    def _straggler(self, event: dict[str, Any], at: float) -> None:
        if not self._keep(self._run.stragglers, event, at, limit=2000):
            self._run.num_stragglers_left_out += 1

    def _straggler_over(self, event: dict[str, Any], at: float) -> None:
        who = [event.get(name) for name in ("rank", "host", "cause")]
        for one in reversed(self._run.stragglers):
            if [one.get(name) for name in ("rank", "host", "cause")] == who:
                one.setdefault("over_at", at)
                return

    def _keep(self, found: list[Any], event: dict[str, Any], at: float, *, limit: int = MAX_TOLD) -> bool:
        if len(found) >= limit:
            return False
        found.append({**event, "at": at})
        found[-1].pop("over_at", None)  # ours
        return True

    def _note(self, event: dict[str, Any], at: float) -> None:
        note = {"at": at, "level": whole_or(event.get("level"), 20), "text": text(event.get("text"))[:4000]}
        if len(self._run.notes) < _FIRST_NOTES:
            self._run.notes.append(note)
            return
        self._last_notes.append(note)
        if len(self._last_notes) > 2 * MAX_NOTES:
            keep = MAX_NOTES - _FIRST_NOTES
            self._run.num_notes_left_out += len(self._last_notes) - keep
            self._last_notes = self._last_notes[-keep:]

    def _exited(self, event: dict[str, Any], at: float) -> None:
        attempt = self._of(event, at)
        if len(attempt.exits) < 10_000:
            attempt.exits.append({**event, "at": at})

    def _verdict(self, event: dict[str, Any], at: float) -> None:
        attempt = self._of(event, at)
        attempt.ended, attempt.ended_at = event, at

    def _lost(self, event: dict[str, Any], at: float) -> None:
        self._run.num_lost += max(0, whole_or(event.get("events"), 0))

    def _end(self, event: dict[str, Any], at: float) -> None:
        self._run.end = event


def _take_report(run: Run, path: Path, *, is_alone: bool) -> None:
    """Errors: LaunchError if there is nothing else and it cannot be read"""
    try:
        found = json.loads(read_plain(str(path), max_bytes=MAX_REPORT_BYTES))
        if not isinstance(found, dict) or not isinstance(found.get("attempts"), list):
            raise ValueError("it is no report of a job")
    except (OSError, ValueError, RecursionError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        if is_alone:
            raise LaunchError(f"{path}: cannot be read as the report of a job: {why[:200]}") from None
        run.problems.append(f"{path.name} could not be read: {why[:200]}")
        return
    run.report = found
    entries: Iterable[Any] = found["attempts"][:MAX_ATTEMPTS]
    for entry in entries:
        if isinstance(entry, dict):
            _take_entry(run, entry)


def _take_entry(run: Run, entry: dict[str, Any]) -> None:
    """What the events do not have of an attempt."""
    place = whole_or(entry.get("number"), 0)
    began_at = _seconds(entry.get("began_at"))
    took_s = number(entry.get("duration_s")) or 0.0
    attempt = run.attempts.setdefault(place, Attempt(number=place, began_at=began_at))
    if attempt.ended is None:
        attempt.ended = entry
        attempt.ended_at = attempt.began_at + took_s
    if not attempt.hosts:
        hosts = entry.get("hosts")
        attempt.hosts = tuple(map(str, hosts)) if isinstance(hosts, list) else ()
    if not attempt.phases:
        phases = {str(name): number(value) for name, value in mapping(entry.get("phases_s")).items()}
        attempt.phases = {
            name: attempt.began_at + value
            for name, value in phases.items()
            if value is not None and name != "ended"
        }
    run.began_at = min(filter(None, (run.began_at, attempt.began_at)), default=0.0)
    run.last_at = max(run.last_at, attempt.ended_at)


def _seconds(value: object) -> float:
    """Since the epoch; 0 for what is no time."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            return 0.0
    return number(value) or 0.0

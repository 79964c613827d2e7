"""A run from its files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..node.system.plain_file import read_plain
from ..run_state.event_reader import EventReader, event_of
from ..run_state.run_state import MAX_ATTEMPTS, RunState
from ..run_state.values import items, number, whole, whole_or
from ..wording import count
from .curves import Curves
from .run import Run

MAX_REPORT_BYTES = 64 << 20
EVENTS, REPORT, LATEST = "events.jsonl", "report.json", "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """The files of a run: events, after those in `NAME.old`, and a report."""

    label: str
    events: Path | None
    report: Path | None = None
    state: str = ""


def find_source(word: str) -> RunSource | None:
    """Return the files of a run that is named by its folder, by the folder with all runs, or by a file; None
    if there is no such path.

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
        return RunSource(label=_label(path), events=None, report=path)
    report = path.with_name(REPORT)
    has_report = path.name == EVENTS and report.is_file()
    return RunSource(label=_label(path), events=path, report=report if has_report else None)


def source_in(folder: Path) -> RunSource:
    """Return the run in this folder, or the latest one in it.

    Errors: LaunchError if there is none
    """
    for one in (folder, folder / LATEST):
        events, report = one / EVENTS, one / REPORT
        if events.is_file() or report.is_file():
            return RunSource(
                label=one.resolve().name,
                events=events if events.is_file() else None,
                report=report if report.is_file() else None,
            )
    raise LaunchError(
        f"{folder}: there is no {EVENTS} and no {REPORT} in it, nor in {LATEST}; give the folder that "
        "--log_dir named, or one of its runs"
    )


def _label(path: Path) -> str:
    return path.resolve().parent.name if path.name in (EVENTS, REPORT) else path.stem


def _is_report(path: Path) -> bool:
    """Tell whether it is one JSON object without events: a report."""
    try:
        start = read_plain(str(path), max_bytes=4096).lstrip()
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {error.strerror}") from None
    if path.suffix == ".json" or start.startswith(b"{\n"):
        return b'"event"' not in start
    return False


def read_run(source: RunSource) -> Run:
    """Read these files. Unreadable parts are noted in `problems`.

    Errors: LaunchError if no part can be read
    """
    state = RunState()
    curves = Curves(state)
    state.observe(curves)
    run = Run(label=source.label, word=source.state, state=state, curves=curves)
    run.sources = [str(one) for one in (source.events, source.report) if one is not None]
    num_events = 0
    if source.events is not None:
        num_events = _take_events(run, source.events)
    report = None if source.report is None else _take_report(run, source.report, is_alone=num_events == 0)
    if not num_events and report is None:
        raise LaunchError(
            f"{', '.join(run.sources)}: no event of a job is in it; give the {EVENTS} or the {REPORT} of "
            "a run"
        )
    last = run.last_attempt.verdict if run.last_attempt is not None else None
    told = (state.exit_code, whole((report or {}).get("exit_code")), last.exit_code if last else None)
    run.exit_code = next((one for one in told if one is not None), None)
    return run


def _take_events(run: Run, path: Path) -> int:
    """Take the events; return their number. Errors: LaunchError if the file cannot be opened or read"""
    state, reader = run.state, EventReader(path)
    try:
        for event in reader.events():
            state.take(event)
    except OSError as error:
        reader.problem = error.strerror or str(error)
    if reader.problem:
        raise LaunchError(f"{path}: cannot be read: {reader.problem}")
    last = event_of(reader.rest)
    if last is not None:
        state.take(last)
    elif reader.rest:
        run.problems.append("The last line of the events has no end: the file was cut, or is being written.")
    if reader.num_bad:
        run.problems.append(f"{count(reader.num_bad, 'line')} of the events could not be read.")
    if state.num_unknown:
        kinds = ", ".join(sorted(state.unknown)[:5])
        run.problems.append(f"{count(state.num_unknown, 'event')} of unknown kinds were left out ({kinds}).")
    if state.num_lost:
        run.problems.append(f"{count(state.num_lost, 'event')} could not be written when the job ran.")
    reader.close()
    return reader.num_events + (last is not None)


def _take_report(run: Run, path: Path, *, is_alone: bool) -> dict[str, Any] | None:
    """Take the report and return it; None if it cannot be read.

    Errors: LaunchError if there is no other file and it cannot be read
    """
    try:
        found = json.loads(read_plain(str(path), max_bytes=MAX_REPORT_BYTES))
        if not isinstance(found, dict) or not isinstance(found.get("attempts"), list):
            raise ValueError("it is no report of a job")
    except (OSError, ValueError, RecursionError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        if is_alone:
            raise LaunchError(f"{path}: cannot be read as the report of a job: {why[:200]}") from None
        run.problems.append(f"{path.name} could not be read: {why[:200]}")
        return None
    for entry in items(found["attempts"])[-MAX_ATTEMPTS:]:
        if isinstance(entry, dict):
            _take_entry(run.state, entry)
    return found


def _take_entry(state: RunState, entry: dict[str, Any]) -> None:
    """Take the end of an attempt, if the events do not have it."""
    place = whole_or(entry.get("number"), 0)
    known = state.attempts.get(place)
    if known is None or known.verdict is None:
        began_at = _seconds(entry.get("began_at")) if known is None else known.began_at
        at = began_at + (number(entry.get("duration_s")) or 0.0)
        state.take({**entry, "event": "verdict", "at": at, "attempt": place})


def _seconds(value: object) -> float:
    """Seconds since the epoch; 0 for other values."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            return 0.0
    return number(value) or 0.0

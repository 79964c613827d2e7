"""Traces that no rank has made, with numbers that can be added up by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dslaunch.launcher.sync.host_clock import HostClock

MS = 1_000_000  # ns
EPOCH = 1_700_000_000 * 10**9  # the system's time when the host's monotonic clock is 0
BASE = EPOCH - 12_345  # what torch's times count from
THREAD = 4711
MADE_UP = {"clock": [0, EPOCH, 100]}


def span(
    kind: str, name: str, began_ms: float, ended_ms: float, *, thread: int = THREAD, **args: Any
) -> list[Any]:
    return [kind, name, round(began_ms * MS), round(ended_ms * MS), thread, *([args] if args else [])]


def torch_event(
    kind: str, name: str, began_ms: float, ended_ms: float, *, tid: int = THREAD, pid: int = THREAD
) -> dict[str, Any]:
    """As torch writes it: microseconds since its base."""
    began = (EPOCH - BASE + began_ms * MS) / 1000
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": began,
        "dur": (ended_ms - began_ms) * 1000,
    }


def write_rank(
    folder: Path,
    rank: int,
    steps: Iterable[tuple[int, float, float, Sequence[list[Any]]]],
    *,
    torch: Sequence[dict[str, Any]] | None = (),
    end: dict[str, Any] | None = None,
) -> Path:
    """`steps`: number, when it began and ended in ms, and its spans. `torch` None: it was killed."""
    head = {"rank": rank, "hostname": "a", "pid": THREAD, "world_size": 2, "thread": THREAD, **MADE_UP}
    lines = [head] + [
        {"step": number, "began": round(began * MS), "ended": round(ended * MS), "spans": list(spans)}
        for number, began, ended, spans in steps
    ]
    if torch is not None:
        lines.append(end or {"end": "whole", "problem": "", "num_dropped": 0, **MADE_UP})
        profile = {"baseTimeNanoseconds": BASE, "traceEvents": list(torch)}
        (folder / f"trace-{rank}.torch.json").write_text(json.dumps(profile))
    path = folder / f"trace-{rank}.spans"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def clock(offset_s: float = 0.0, error_s: float = 0.0) -> HostClock:
    """Of a host whose clock is that much behind ours."""
    made = HostClock()
    made.add(sent_at=offset_s - error_s, at=0.0, heard_at=offset_s + error_s)
    return made

"""Fewer events with numbers as a job gets older, so that the events of weeks can still be read as a whole."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..node.observe.metrics import FOLDED, is_sum, merge
from .telemetry import METRICS, EventSink

RARER = 1000  # an event holds at least this part of the job's age


class Thinned:
    """Passes on to `sink` every event but those of numbers, which are put together until it is time."""

    def __init__(self, sink: EventSink, *, rarer: int = RARER) -> None:
        self._sink = sink
        self._rarer = rarer
        self._began_at = time.monotonic()
        self._passed_at = float("-inf")
        self._held: Mapping[str, Any] | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        if event["event"] != METRICS:
            if event["event"] in ("attempt", "verdict", "end"):
                self._pass()
            self._sink.take(event)
            return
        self._held = event if self._held is None else together(self._held, event)
        now = time.monotonic()
        if now - self._passed_at >= (now - self._began_at) / self._rarer:
            self._pass()

    def close(self) -> None:
        self._pass()
        self._sink.close()

    def _pass(self) -> None:
        if self._held is not None:
            self._sink.take(self._held)
            self._held = None
            self._passed_at = time.monotonic()


def together(first: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Combine two events with numbers at the time of the later one.

    Sums and lines are added up; of other numbers, and of a host's, the later one counts.
    """
    ranks = {name: dict(row) for name, row in first["ranks"].items()}
    for name, row in later["ranks"].items():
        known = ranks.setdefault(name, {})
        if name.endswith(FOLDED):
            _add_folded(known, row)
        else:
            merge(known, row)
    lines = dict(first["lines"])
    for rank, number in later["lines"].items():
        lines[rank] = lines.get(rank, 0) + number
    return {**later, "ranks": ranks, "hosts": {**first["hosts"], **later["hosts"]}, "lines": lines}


def _add_folded(known: dict[str, Any], row: Mapping[str, Any]) -> None:
    """Add up the least, the mean and the greatest of sums, each by itself; ranks are the later ones."""
    for name, values in row.items():
        before = known.get(name)
        if is_sum(name) and before is not None:
            values = [*(a + b for a, b in zip(before[:3], values[:3], strict=True)), *values[3:]]
        known[name] = values

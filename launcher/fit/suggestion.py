"""The rows of `dslaunch plan --suggest`: configurations, what each needs, and why it stands in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from ...shared.table import table
from ..wording import count
from .candidates import Candidate, Placing
from .finding import FitFinding
from .step_time import TimeRange, shown_range, whole_step
from .verdict import OUTSIDE_BYTES, gib
from .ways_out import WayOut, candidate_data

MAX_ROWS = 5
_EQUAL = 1.05  # factor of two times that are not told apart
MARGIN = 0.1  # share of a GPU, or of hosts without GPUs, that a suggested configuration leaves free


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A configuration that was rehearsed. `finding` None: it could not be, and `why_not` says why."""

    candidate: Candidate
    finding: FitFinding | None
    why_not: str = ""

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the fullest GPU, or of a rank on the fullest host where there are none."""
        found = self.finding
        if found is None:
            return 0
        if found.memory.device_bytes is None:
            return max(use.needed_bytes // use.num_ranks for use in found.uses)
        return found.peak_bytes + OUTSIDE_BYTES

    @property
    def fits_at_all(self) -> bool:
        """Tell whether it fits, with nothing to spare."""
        return self.finding is not None and self.finding.verdict.fits

    def fits(self) -> bool:
        """Tell whether it fits, with the margin."""
        found = self.finding
        if found is None or not found.verdict.fits:
            return False
        if found.memory.device_bytes is None:
            return all(use.needed_bytes <= (use.total_bytes or 0) * (1 - MARGIN) for use in found.uses)
        return self.device_bytes <= found.memory.device_bytes * (1 - MARGIN)

    @property
    def time(self) -> TimeRange | None:
        """Return the time of a step of the slowest kind of rank; None if speeds are not known."""
        if self.finding is None or not self.finding.times:
            return None
        return max((whole_step(parts) for parts in self.finding.times), key=middle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions:
    """All that were tried, the best first, and the placings whose bound is above the memory."""

    tried: tuple[Tried, ...]
    too_large: tuple[tuple[Placing, int], ...]  # placings, and the bytes that each needs at least
    hosts: WayOut | None  # more hosts, looked for only where nothing fits
    config: Mapping[str, Any]  # the ds_config that was given
    num_others: int = 0  # configurations that were compared by their bounds alone
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Tried | None:
        """Return the fastest that fits."""
        first = next(iter(self.tried), None)
        return first if first is not None and first.fits() else None

    def lines(self, columns: int | None = None) -> list[str]:
        """Return what is printed below the job's own answer."""
        rows = [self._row(one) for one in self.tried][:MAX_ROWS]
        rows += [
            [placing.text, f"{gib(num_bytes)} at least", "-", "-", "too large by its parts alone"]
            for placing, num_bytes in self.too_large
        ][: MAX_ROWS - len(rows)]
        has_gpus = all(one.finding is None or one.finding.memory.device_bytes for one in self.tried)
        head = ["", "each GPU" if has_gpus else "each rank", "fullest host", "a step", "why"]
        return [
            "",
            self._first(),
            *(f"  {line}" for line in table(rows, head=head, columns=columns)),
            *self._last(),
        ]

    def _first(self) -> str:
        if self.best is not None:
            text = self.best.candidate.text
            return f"suggested: {text}, the fastest of those that were tried and leave a tenth free"
        nothing = "suggested: nothing that was tried fits with a tenth to spare"
        if self.hosts is not None:
            fits = "fits" if self.hosts.is_rehearsed else "would fit by its bounds"
            return f"{nothing}; {self.hosts.candidate.text} {fits} on {self.hosts.num_hosts} such hosts"
        return f"{nothing}, and more hosts do not change that"

    def _last(self) -> list[str]:
        """Return the lines below the rows: by how much others do not fit, and what was not rehearsed."""
        large = [
            f"{one.candidate.text} ({self._why(one)})"
            for one in self.tried[MAX_ROWS:]
            if one.finding is not None and not one.fits_at_all
        ]
        large += [
            f"{placing.text} ({gib(num_bytes)} at least)"
            for placing, num_bytes in self.too_large[max(0, MAX_ROWS - len(self.tried)) :]
        ]
        lines = [f"others that do not fit: {'; '.join(large)}"] if large else []
        if self.num_others:
            number = count(self.num_others, "other configuration")
            lines.append(f"not rehearsed, and not too large by their parts alone: {number}")
        return [*lines, *self.notes]

    def _row(self, one: Tried) -> list[str]:
        found = one.finding
        if found is None:
            return [one.candidate.text, "-", "-", "-", f"cannot be rehearsed: {one.why_not}"]
        time = one.time
        step = "-" if time is None else shown_range(time)
        host = max(use.needed_bytes for use in found.uses)
        return [one.candidate.text, gib(one.device_bytes), gib(host), step, self._why(one)]

    def _why(self, one: Tried) -> str:
        found = one.finding
        if found is None:
            return ""
        over = one.device_bytes - (found.memory.device_bytes or one.device_bytes)
        if over > 0:
            return f"too large by {gib(over)}"
        small = next((use for use in found.uses if use.is_too_small), None)
        if small is not None:
            over = small.needed_bytes - (small.total_bytes or 0)
            return f"too large for the memory of {small.name} by {gib(over)}"
        if not one.fits():
            return "fits, with less than a tenth to spare"
        best = self.best
        if best is one or best is None:
            return "the fastest that fits"
        if one.time is None or best.time is None:
            return "fits, and sends or copies more"
        ratio = middle(one.time) / (middle(best.time) or 1.0)
        return f"fits; {ratio:.1f} times as long" if ratio > _EQUAL else "fits, and is about as fast"

    def as_data(self) -> list[dict[str, Any]]:
        """Return the rows for JSON."""
        return [
            candidate_data(one.candidate)
            | {
                "fits": one.fits(),
                "device_bytes": one.device_bytes,
                "step_seconds": None if one.time is None else one.time._asdict(),
                "why": one.why_not or self._why(one),
            }
            for one in self.tried
        ]


def in_order(tried: Sequence[Tried]) -> tuple[Tried, ...]:
    """Return those that fit, the fastest first, then the others by what they need.

    Without known speeds the order in which they were tried stands.
    """
    return tuple(sorted(tried, key=_place))


def _place(one: Tried) -> tuple[bool, float]:
    if not one.fits():
        return True, float(one.device_bytes or 1 << 62)
    return False, 0.0 if one.time is None else middle(one.time)


def middle(time: TimeRange) -> float:
    """Return the middle of a range whose ends are factors away."""
    return sqrt(max(time.low, 1e-9) * max(time.high, 1e-9))

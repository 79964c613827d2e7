"""Duration of each phase of a start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

FIRST_OUTPUT = "first output"
FIRST_STEP = "first step"
FAULT, DETECTED, DECIDED, STOPPED = "fault", "detected", "decided", "stopped"  # moments of an attempt's end
BAR_COLUMNS = 40


class Timings:
    """Seconds from the beginning to the end of each phase that all hosts or all ranks have completed."""

    def __init__(
        self, num_ranks: int, *, tell: Callable[[str, float], None] = lambda phase, at_s: None
    ) -> None:
        """`tell` gets each phase and its end, on the monotonic clock."""
        self._num_ranks = num_ranks
        self._tell = tell
        # For each phase that ranks report: the ranks that reported it, and the time of the latest.
        self._latest: dict[str, tuple[set[int], float]] = {}
        self.began_at = time.monotonic()
        self.phases_s: dict[str, float] = {}
        self._end_s: dict[str, float] = {}  # moments of the end
        # Seconds until the first line of any rank; set by the threads that read.
        self._first_output_s: float | None = None

    def begin(self) -> None:
        self.began_at = time.monotonic()

    def heard_output(self, at_s: float) -> None:
        """Note the output of a rank; may be called from any thread."""
        if self._first_output_s is None:
            self._first_output_s = at_s - self.began_at

    def end(self, phase: str, at_s: float | None = None) -> None:
        """End the phase for all, now or at this time of the monotonic clock."""
        ended_at = time.monotonic() if at_s is None else at_s
        self.phases_s[phase] = max(0.0, ended_at - self.began_at)
        self._tell(phase, ended_at)

    def take(self, rank: int, phase: str, at_s: float) -> None:
        """End the phase for one rank, whose first word on it counts.

        All ranks end a step together, so the first step ends with the first word on it: in many programs rank
        0 alone tells of steps.
        """
        ranks, latest = self._latest.get(phase, (set(), 0.0))
        if rank in ranks or phase in self.phases_s:
            return
        ranks.add(rank)
        self._latest[phase] = ranks, max(latest, at_s)
        if phase == FIRST_STEP or len(ranks) == self._num_ranks:
            self.end(phase, self._latest[phase][1])

    def mark(self, moment: str) -> None:
        """Note a moment of the attempt's end, the first time that it is given."""
        self._end_s.setdefault(moment, time.monotonic() - self.began_at)

    def end_s(self, fault_at_s: float) -> dict[str, float]:
        """Return the seconds from the beginning to each moment of an end by this fault."""
        return {FAULT: max(0.0, fault_at_s - self.began_at), **self._end_s}

    def all_s(self) -> dict[str, float]:
        """Return the seconds of every phase, in the order of time."""
        phases = dict(self.phases_s)
        if self._first_output_s is not None:
            phases[FIRST_OUTPUT] = self._first_output_s
        return dict(sorted(phases.items(), key=lambda one: one[1]))


def drawn(phases_s: Iterable[tuple[str, float]]) -> list[str]:
    """Draw a line for each phase, with a bar from the end of the one before to its own end."""
    phases = list(phases_s)
    names = max((len(name) for name, _ in phases), default=0)
    last_s = max((seconds for _, seconds in phases), default=0.0) or 1.0
    ends = [round(BAR_COLUMNS * seconds / last_s) for _, seconds in phases]
    return [
        f"{name:{names}} {seconds:7.2f} s  {' ' * begin}{'#' * (end - begin) or '|'}"
        for (name, seconds), begin, end in zip(phases, [0, *ends], ends, strict=False)
    ]


def describe(phases_s: Iterable[tuple[str, float]]) -> str:
    """Describe the phases in one line."""
    return f"timings: {', '.join(f'{name} {seconds:.2f} s' for name, seconds in phases_s)}"

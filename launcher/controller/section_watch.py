"""The section that a running job is in, and whether it stands still there for too long.

What a job does is known from the numbers of its ranks: a step that has ended, what a rank does instead of
training, and `waiting`, the seconds for which a rank has stood in one collective.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ..inputs.rank_set import format_ranks
from ..job.section_limits import SectionLimits
from ..node.observe.metrics import FOLDED, PAUSE, PAUSES
from ..options.hang_limit import EVALUATION, GENERATION, LOAD, SAVE, START, STEP
from ..run_state.values import items, number
from ..wire.frames import Metrics

# The words of ranks for what they do; the last one that any rank says decides.
SECTION_OF = dict(zip(PAUSES, (EVALUATION, GENERATION, SAVE, LOAD), strict=True))
WAITING = "waiting"
_MOVING = frozenset((EVALUATION, GENERATION))  # sections in which every line of a rank is a sign of movement


class LongStandstill(NamedTuple):
    """A section that takes longer than its limit. `rank` is one that the others wait for, None if there is
    none: all of them wait, or none does.
    """

    text: str
    rank: int | None

    def with_stopped(self, ranks: Collection[int]) -> LongStandstill:
        """Name a rank that is stopped: it is the cause, whatever was known of others."""
        if not ranks or self.rank in ranks:
            return self
        rank = min(ranks)
        return LongStandstill(f"{self.text}; rank {rank} is stopped, as by SIGSTOP", rank)


class SectionWatch:
    """Follows one attempt. All times are on the launcher's monotonic clock."""

    def __init__(self, limits: SectionLimits, ranks: Iterable[int]) -> None:
        """`ranks` are those of the job, without servers."""
        self._limits = limits
        self._ranks = frozenset(ranks)
        self._section = START
        self._moved_at: float | None = None
        self._step = -1.0
        self._pauses: dict[
            str, int
        ] = {}  # what each rank, or host, does: a place in PAUSES, from 1; 0: it trains
        self._waits: dict[int, float] = {}  # seconds by rank; of a host with many ranks, those of the least
        self._knows_all = True  # each rank tells for itself
        self._is_over = False

    def begin(self, now: float) -> None:
        """Begin, if that was not done: the ranks are started."""
        if self._moved_at is None:
            self._moved_at = now

    def take(self, host: str, item: Metrics, at_s: float) -> None:
        """Take the numbers of a host's ranks."""
        for rank, row in item.ranks.items():
            if not isinstance(row, dict):
                continue
            if rank == FOLDED:
                self._take_folded(host, row, at_s)
            else:
                state, waits_s = row.get("state"), number(row.get(WAITING)) or 0.0
                self._waits[int(rank)] = waits_s
                pause = PAUSES.index(state) + 1 if state in PAUSES else 0
                self._take_row(
                    rank, step=number(row.get("step")), pause=pause, at_s=at_s, is_waiting=waits_s > 0
                )

    def _take_folded(self, host: str, row: Mapping[str, Any], at_s: float) -> None:
        """Take the least, mean and greatest of a host's ranks, and the ranks of the first and last."""
        self._knows_all = False
        step, pause, waits = (items(row.get(name)) for name in ("step", PAUSE, WAITING))
        is_waiting = bool(waits) and (number(waits[2]) or 0.0) > 0
        if waits:
            self._waits[int(waits[3])] = number(waits[0]) or 0.0
            self._waits[int(waits[4])] = number(waits[2]) or 0.0
        self._take_row(
            host,
            step=number(step[2]) if step else None,
            pause=int(pause[2]) if pause else 0,
            at_s=at_s,
            is_waiting=is_waiting,
        )

    def _take_row(self, who: str, *, step: float | None, pause: int, at_s: float, is_waiting: bool) -> None:
        self._pauses[who] = pause
        is_step = step is not None and step > self._step
        if step is not None:
            self._step = max(step, self._step)
        last = max(self._pauses.values())
        section = SECTION_OF[PAUSES[last - 1]] if last else STEP if self._step >= 0 else START
        if is_step or section != self._section or (section in _MOVING and not is_waiting):
            self._move(section, at_s)

    def _move(self, section: str, at_s: float) -> None:
        """The job has moved, and is in this section from now on."""
        if self._moved_at is not None and at_s > self._moved_at:
            self._limits.note(self._section, at_s - self._moved_at)
        self._section, self._moved_at = section, at_s

    @property
    def section(self) -> str:
        return self._section

    def still_s(self, now: float) -> float:
        """Seconds since the job has moved."""
        return 0.0 if self._moved_at is None else max(0.0, now - self._moved_at)

    def look(self, now: float) -> LongStandstill | None:
        """Return the standstill that is too long, once."""
        limit = self._limits.limit_of(self._section)
        if self._is_over or limit is None or self.still_s(now) <= limit.seconds:
            return None
        is_waiting = any(self._waits.values())
        if limit.is_learned and not is_waiting:
            return None
        self._is_over = True
        text = (
            f"nothing has moved for {self.still_s(now):.0f} s in the section {self._section!r}, whose limit "
            f"is {limit.seconds:.4g} s ({limit.reason})"
        )
        if not is_waiting:
            return LongStandstill(f"{text}; no rank is known to wait for another one", None)
        told = self._ranks if self._knows_all else self._waits.keys()
        missing = sorted(rank for rank in told if not self._waits.get(rank))
        if not missing:
            return LongStandstill(f"{text}; all ranks wait for each other, or for the network", None)
        them = f"rank{'s' if len(missing) > 1 else ''} {format_ranks(missing)}"
        return LongStandstill(f"{text}; the others wait for {them}", missing[0])

"""Which steps are timed: all of them, where that costs next to nothing, and else as many as a part of their
time pays for.

Ranks time the same steps, so that what one of them waits for is seen on another one, and they need not agree
on a number: each compares a step's place in the sequence of multiples of the golden ratio, modulo 1, with its
share. A rank with a smaller share times some of the steps that the others do. Such places are spread evenly
over the steps of any period, so what happens at each 8th step, as with 8 workers that load data, is timed as
often as it happens.
"""

from __future__ import annotations

BUDGET = 0.0002  # of the time. Lines, and what is done in each step, cost the rest of 0.001
# What a timed step costs, and each mark in it: as measured on slow cores, whose caches hold other things.
STEP_S, MARK_S = 9e-5, 4e-6
_ALL = 2**32
_GOLDEN_RATIO = 2654435769  # its fraction, of 2**32


class TimedSteps:
    """Those of one process: all, until it is known what they cost."""

    def __init__(self) -> None:
        self._limit = _ALL

    def __contains__(self, step: int) -> bool:
        """Whether this step, counted from 1, is one of them."""
        return step * _GOLDEN_RATIO % _ALL < self._limit

    def adapt(self, *, num_steps: float, seconds: float, marks: float) -> None:
        """So many steps were told at once, and took so long; a timed one has so many marks.

        Of those that are told together one is timed in the mean: where each step is told, each is timed.
        """
        affordable = BUDGET * seconds / num_steps / (STEP_S + marks * MARK_S)
        self._limit = int(_ALL * min(1.0, max(affordable, 1.0 / num_steps)))

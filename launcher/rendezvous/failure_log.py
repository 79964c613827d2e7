"""The failures on all nodes of a job without SSH, as node 0 heard them, and the first of them."""

from __future__ import annotations

from .messages import Failed

MAX_FAILURES = 4096


class FailureLog:
    """Failures, each with its time on node 0's monotonic clock.

    `stopped_at`: when all were told to stop.
    """

    def __init__(self) -> None:
        self.stopped_at: float | None = None
        self._failures: list[tuple[float, Failed]] = []  # in the order in which they were heard of

    def add(self, at: float, failed: Failed) -> None:
        if len(self._failures) < MAX_FAILURES:
            self._failures.append((at, failed._replace(age_s=0.0)))

    def first_heard(self) -> tuple[float, Failed] | None:
        return self._failures[0] if self._failures else None

    def culprit(self) -> tuple[float, Failed] | None:
        """Return the earliest failure before all nodes were told to stop; the same rule as verdict.py,
        `verdict_of`.
        """
        return min(
            (one for one in self._failures if self._is_before_stop(one[0])),
            key=lambda one: one[0],
            default=None,
        )

    def known(self) -> list[tuple[float, Failed]]:
        """Return failures that the stop did not cause, as verdict.py, `verdict_of` has them."""
        return [one for one in self._failures if self._is_before_stop(one[0]) or one[1].rank < 0]

    def _is_before_stop(self, at: float) -> bool:
        return self.stopped_at is None or at <= self.stopped_at

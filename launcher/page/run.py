"""The data of a page: one run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..run_state.attempt import AttemptState
from ..run_state.run_state import RunState
from .curves import Curves


@dataclass(slots=True, kw_only=True)
class Run:
    """`word` is the registry's state, if it was asked; `exit_code` is None while it is not known, and
    `problems` are sentences on missing parts.
    """

    label: str
    word: str = ""
    state: RunState
    curves: Curves
    exit_code: int | None = None
    problems: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.state.job.name or self.label

    @property
    def attempts(self) -> list[AttemptState]:
        """Attempts in their order."""
        return [one for _, one in sorted(self.state.attempts.items())]

    @property
    def last_attempt(self) -> AttemptState | None:
        return self.attempts[-1] if self.state.attempts else None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of the last attempt."""
        return self.last_attempt.hosts if self.last_attempt else ()

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the last attempt."""
        return self.last_attempt.num_ranks if self.last_attempt else 0

    @property
    def duration_s(self) -> float:
        """Seconds from its first event to its last."""
        told = self.state.duration_s
        return told if told and math.isfinite(told) else max(0.0, self.state.at - self.state.began_at)

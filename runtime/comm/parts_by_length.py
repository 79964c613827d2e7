"""What steps that were not timed were made of: the same as timed steps that were about as long.

Steps that take longer do so for a reason of their own: the first one compiles, another rank was late, the
program stands still once. So a step is compared with those of its length alone, and where there was none it
is not known what it was made of. What is known of all steps, as what passes between them, is in no length
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import frexp

_KEPT = 0.9  # of what was known, for each step that is added: some 10 steps count


class PartsByLength:
    """Units: seconds"""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, float]] = {}  # by length, the parts of the last timed steps
        self._untimed_s: dict[int, float] = {}  # by length, how long those took that are to be divided

    def add(self, parts: Mapping[str, float]) -> None:
        """A step was timed."""
        known = self._known.setdefault(_length(sum(parts.values())), dict.fromkeys(parts, 0.0))
        for name, seconds in parts.items():
            known[name] = _KEPT * known[name] + seconds

    def add_untimed(self, seconds: float) -> None:
        """A step was not timed."""
        length = _length(seconds)
        self._untimed_s[length] = self._untimed_s.get(length, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the parts of the untimed steps since the last call, as far as they are known."""
        found: dict[str, float] = {}
        for length, seconds in self._untimed_s.items():
            parts = next((self._known[one] for one in _like(length) if one in self._known), {})
            whole = sum(parts.values())
            for name, part in parts.items():
                found[name] = found.get(name, 0.0) + seconds * part / whole
        self._untimed_s = {}
        return found


def _length(seconds: float) -> int:
    """Those of equal length differ by less than a factor of 2."""
    return frexp(seconds)[1]


def _like(length: int) -> tuple[int, ...]:
    return length, length - 1, length + 1

"""Steps, samples and tokens a second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .rank_state import NumberSource
from .values import greatest_of, mean_of

COUNTERS = ("step", "samples", "tokens")
RATE_S, RATE_STEPS = 10.0, 10.0  # until a rate is made of a counter alone, whose ends are rough
LOST_S = 60.0  # then another rank's counter is taken


class Rate(NamedTuple):
    """`name` is a number of the run, such as `tokens_per_s`, over `passed_s` seconds."""

    name: str
    value: float
    passed_s: float


class _Counted(NamedTuple):
    """A counter of one rank when a rate was last made of it."""

    key: str
    at: float
    value: float
    step: float


class Rates:
    """Rates, each made of one rank's own numbers: ranks report at different moments, and a step may be longer
    than the time between two reports.
    """

    def __init__(self) -> None:
        self._counted: dict[str, _Counted] = {}

    def of(self, at: float, sources: Sequence[NumberSource]) -> Iterator[Rate]:
        """Yield the rates that follow from the present reports."""
        num_steps = timed_s = 0.0
        for source in sources:
            steps, step_s = (mean_of(source.told.get(name)) or 0.0 for name in ("steps", "step_s"))
            if step_s > 0:
                num_steps, timed_s = num_steps + steps, timed_s + step_s
        steps_per_s = num_steps / timed_s if timed_s else 0.0
        if steps_per_s > 0:
            yield Rate("steps_per_s", steps_per_s, timed_s)
        step_of = dict(_told(sources, "step"))
        for name in COUNTERS:
            rate = "steps_per_s" if name == "step" else f"{name}_per_s"
            for key, value in _told(sources, name):
                now = _Counted(key, at, value, step_of.get(key, 0.0))
                before = self._counted.setdefault(name, now)
                if key != before.key and at - before.at < LOST_S:
                    continue
                passed_s, more = at - before.at, now.value - before.value
                more_steps = now.step - before.step
                if key != before.key or more < 0:
                    self._counted[name] = now
                elif steps_per_s > 0 and more_steps > 0:
                    self._counted[name] = now
                    if name != "step":
                        yield Rate(rate, more / more_steps * steps_per_s, passed_s)
                elif steps_per_s > 0 or more <= 0 or passed_s <= 0:
                    continue
                elif passed_s >= RATE_S or more_steps >= RATE_STEPS:
                    self._counted[name] = now
                    yield Rate(rate, more / passed_s, passed_s)


def _told(sources: Sequence[NumberSource], name: str) -> Iterator[tuple[str, float]]:
    """Yield the greatest of several ranks."""
    for source in sources:
        value = greatest_of(source.told.get(name))
        if value is not None:
            yield source.key, value

"""Successive halving: the steps that each configuration runs for, and the rows of `dslaunch plan --tune`.

Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from ...shared.table import table
from ..wording import count
from .step_time import shown_range
from .suggestion import Tried

THROUGHPUT, LATENCY = "throughput", "latency"
_EQUAL = 1.02  # factor of two measured times that are not told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a trial. `step_s` is the median of its steps on the slowest rank; None: the configuration is
    out, and `why_out` says why.
    """

    step_s: float | None = None
    num_samples: int = 0  # samples of a step, on all ranks
    num_steps: int = 0  # measured ones
    why_out: str = ""
    kept_files: str = ""  # why the program's files were written; empty if they vanished with the trial

    def cost(self, metric: str) -> float:
        """Return the number of which less is better: seconds of a sample, or of a step."""
        if self.step_s is None:
            return float("inf")
        return self.step_s / max(1, self.num_samples) if metric == THROUGHPUT else self.step_s


class TrialPlace(NamedTuple):
    """A configuration and the round of a trial; rounds count from 0."""

    name: str
    number: int


Known = Mapping[TrialPlace, Outcome]


class TrialRound(NamedTuple):
    """The trials of one round."""

    number: int
    num_steps: int  # that each measures
    names: tuple[str, ...]


class Halving(NamedTuple):
    """The better half of each round runs twice as long in the next, until one is left."""

    names: tuple[str, ...]
    first_steps: int
    metric: str = THROUGHPUT

    def rounds(self, known: Known) -> Iterator[TrialRound]:
        """Yield the rounds up to the first that has not ended."""
        names, number = self.names, 0
        while len(names) > 1 or number == 0:
            yield TrialRound(number, self.first_steps * 2**number, names)
            ended = [(known.get(TrialPlace(one, number)), one) for one in names]
            if any(outcome is None for outcome, _ in ended):
                return
            good = sorted(
                (outcome.cost(self.metric), one)
                for outcome, one in ended
                if outcome is not None and outcome.step_s is not None
            )
            names, number = tuple(one for _, one in good[: (len(good) + 1) // 2]), number + 1

    def next_trial(self, known: Known) -> tuple[TrialPlace, int] | None:
        """Return the trial that is due, and the steps that it measures; None: all have ended."""
        for one in self.rounds(known):
            for name in one.names:
                if TrialPlace(name, one.number) not in known:
                    return TrialPlace(name, one.number), one.num_steps
        return None

    def last(self, name: str, known: Known) -> tuple[int, Outcome] | None:
        """Return the last round of a configuration, and its outcome."""
        ended = [(place.number, outcome) for place, outcome in known.items() if place.name == name]
        return max(ended, key=lambda one: one[0], default=None)

    def order(self, known: Known) -> list[str]:
        """Return the configurations that have ended well, the best first: those of later rounds, then by
        what was measured.
        """
        found = [(name, last) for name in self.names if (last := self.last(name, known)) is not None]
        good = [
            (-number, one.cost(self.metric), name) for name, (number, one) in found if one.step_s is not None
        ]
        return [name for _, _, name in sorted(good)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The configurations that ran, with what was measured."""

    tried: tuple[Tried, ...]
    halving: Halving
    known: Known
    config: Mapping[str, Any]  # the ds_config that was given

    @property
    def best(self) -> Tried | None:
        """Return the fastest."""
        order = self.halving.order(self.known)
        return next((one for one in self.tried if order and one.candidate.text == order[0]), None)

    def best_config(self) -> dict[str, Any] | None:
        """Return the ds_config of the fastest."""
        best = self.best
        return None if best is None else best.candidate.config(self.config)

    def lines(self, columns: int | None = None) -> list[str]:
        """Return the line that names the fastest, and the table."""
        order = self.halving.order(self.known)
        others = [one for one in self.halving.names if one not in order]
        rows = [self._row(name) for name in (*order, *others)]
        head = ["", "predicted", "a step", "samples/s", "steps", "why"]
        return ["", self._first(), *(f"  {line}" for line in table(rows, head=head, columns=columns))]

    def _first(self) -> str:
        best = self.best
        number = len(self.halving.names)
        if best is None:
            return f"tuned: of {count(number, 'configuration')} that ran, none came to the end of its steps"
        (_, outcome) = self.halving.last(best.candidate.text, self.known) or (0, Outcome())
        return (
            f"tuned: {best.candidate.text}, the fastest of {number} that ran: {_rate(outcome)} samples/s, "
            f"{_seconds(outcome.step_s or 0.0)} a step"
        )

    def _row(self, name: str) -> list[str]:
        one = next(one for one in self.tried if one.candidate.text == name)
        predicted = "-" if one.time is None else shown_range(one.time)
        last = self.halving.last(name, self.known)
        if last is None:
            return [name, predicted, "-", "-", "-", "did not run"]
        _, outcome = last
        if outcome.step_s is None:
            return [name, predicted, "-", "-", "-", f"out: {outcome.why_out}"]
        measured = [_seconds(outcome.step_s), _rate(outcome), str(outcome.num_steps)]
        return [name, predicted, *measured, self._why(one, outcome)]

    def _why(self, one: Tried, outcome: Outcome) -> str:
        best = self.best
        if best is one or best is None:
            return "the fastest"
        last = self.halving.last(best.candidate.text, self.known)
        metric = self.halving.metric
        ratio = outcome.cost(metric) / (last[1].cost(metric) if last else 1.0)
        return f"{ratio:.2f} times as long" if ratio > _EQUAL else "about as fast"

    def as_data(self) -> list[dict[str, Any]]:
        """Return the rows for JSON."""
        best = self.best
        return [
            {
                "configuration": one.candidate.text,
                "ds_config": one.candidate.config(self.config),
                "predicted_seconds": None if one.time is None else one.time._asdict(),
                "rounds": [
                    {
                        "steps": outcome.num_steps,
                        "step_seconds": outcome.step_s,
                        "samples_per_second": None
                        if outcome.step_s is None
                        else outcome.num_samples / outcome.step_s,
                        "why_out": outcome.why_out,
                    }
                    for place, outcome in sorted(self.known.items())
                    if place.name == one.candidate.text
                ],
                "is_best": one is best,
            }
            for one in self.tried
        ]


def measured(told: Mapping[int, Any], *, num_ranks: int) -> Outcome | None:
    """Return what the ranks have told of a trial; None if not all have told times.

    The step is as long as that of the slowest rank: each rank's median, and the greatest of them.
    """
    found: list[tuple[float, int, int]] = []
    kept = ""
    for one in told.values():
        try:
            times = [float(time) for time in one["steps_s"]]
            found.append((median(times), len(times), int(one["samples"])))
            kept = kept or str(one["kept_files"])
        except (KeyError, TypeError, ValueError):  # no step was measured
            return None
    if len(found) < num_ranks or not found:
        return None
    return Outcome(
        step_s=max(time for time, _, _ in found),
        num_steps=min(number for _, number, _ in found),
        num_samples=max(number for _, _, number in found),
        kept_files=kept,
    )


def micro_batch_of(told: Mapping[int, Any]) -> int | None:
    """Return the samples of a micro batch as the ranks saw them; None if they differ, or none was seen."""
    rows: Sequence[Any] = [one.get("rows") for one in told.values() if isinstance(one, Mapping)]
    return rows[0] if rows and isinstance(rows[0], int) and len(set(rows)) == 1 else None


def _rate(outcome: Outcome) -> str:
    return f"{outcome.num_samples / (outcome.step_s or 1.0):.4g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

"""Is right what a program printed? Each judge returns what is wrong in words, empty if nothing is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.field.run import Run

Judge = Callable[[Run], str]

# Sums of float32 in another order move the losses of a few steps by less than 1e-5 of their value; the faults
# of the reports move them by more than 1e-2.
ROUNDING = 1e-4
BF16_ROUNDING = 5e-2  # of a gradient whose weights, activations and parts are in bfloat16, after a few steps
SHOWN = 3  # numbers of a list
MOST_LETTERS = 160  # of an error


def ends(run: Run) -> str:
    """Every launch ends by itself with code 0, and every rank printed its facts."""
    if run.code is None:
        return f"no end within {run.limit_s:g} s"
    if run.code != 0:
        error = run.error if len(run.error) <= MOST_LETTERS else f"{run.error[:MOST_LETTERS]} ..."
        return f"exit code {run.code}: {error}"
    return "" if run.facts else "no rank printed anything"


def agree(found: str, wanted: str, *, within: float = ROUNDING) -> Judge:
    """It ends, and on every rank the numbers of `found` are those of `wanted`, relative to the largest."""

    def judge(run: Run) -> str:
        fault = ends(run)
        if fault:
            return fault
        pairs = [(one[found], one[wanted]) for one in run.facts if found in one]
        if not pairs:
            return f"no rank printed {found}"
        for have, want in pairs:
            if not _are_near(_flat(have), _flat(want), within):
                return f"{found} {_shown(have)} instead of {_shown(want)}"
        return ""

    return judge


def is_equal(found: str, wanted: Any) -> Judge:
    """It ends, and every rank that printed this fact printed this value."""

    def judge(run: Run) -> str:
        fault = ends(run)
        if fault:
            return fault
        values = run.of(found)
        if not values:
            return f"no rank printed {found}"
        others = [value for value in values if value != wanted]
        return f"{found} {_shown(others[0])} instead of {_shown(wanted)}" if others else ""

    return judge


def at_most(found: str, limit: str) -> Judge:
    """It ends, and on every rank the number of `found` is at most that of `limit`."""

    def judge(run: Run) -> str:
        fault = ends(run)
        pairs = [(one[found], one[limit]) for one in run.facts if found in one]
        if fault or not pairs:
            return fault or f"no rank printed {found}"
        have, most = max(pairs, key=lambda pair: pair[0] - pair[1])
        return f"{found} {_shown(have)}, more than {_shown(most)}" if have > most else ""

    return judge


def fails(run: Run) -> str:
    """The launcher ends by itself, and its exit code says that a rank has failed."""
    if run.code is None:
        return f"no end within {run.limit_s:g} s"
    return "" if run.code else "exit code 0"


def refuses(name: str) -> Judge:
    """Nothing is started, and the error has this name in it."""

    def judge(run: Run) -> str:
        if run.facts:
            return f"{len(run.facts)} ranks were started on this machine"
        if run.code is None or run.code == 0:
            return ends(run)
        return "" if name in run.output else f"an error without {name!r}: {run.error}"

    return judge


def both(*judges: Judge) -> Judge:
    """All of them find nothing wrong; otherwise what the first of them finds."""
    return lambda run: next((fault for judge in judges if (fault := judge(run))), "")


def _flat(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for one in value for number in _flat(one)]
    return [math.nan if value is None else float(value)]


def _are_near(have: list[float], want: list[float], within: float) -> bool:
    largest = max((abs(number) for number in want), default=0.0)
    return len(have) == len(want) and all(
        abs(one - other) <= within * largest for one, other in zip(have, want, strict=True)
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        more = ", ..." if len(value) > SHOWN else ""
        return ", ".join(_shown(one) for one in value[:SHOWN]) + more if value else "nothing"
    return str(value)

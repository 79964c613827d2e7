"""What an option takes that is a number: one rule, and one way to say it, for all of them."""

from __future__ import annotations

import math
import re
from typing import Any

import click

MOST = 10**9  # of a count that nothing else bounds
MOST_S = 1_000_000.0  # eleven days; the kernel takes no longer wait for a connection


class Whole(click.ParamType):
    """A whole number from `least` to `most`, in decimal digits.

    `absent`: what may be written as well, as DeepSpeed's scripts do, for an option that is not given.
    `meaning` says what a value means that is not plain.
    """

    name = "integer"

    def __init__(
        self, least: int = 0, most: int = MOST, *, absent: int | None = None, meaning: str = ""
    ) -> None:
        self._least, self._most = least, most
        self._absent = absent
        self._allowed = _range("a whole number", str(least), None if most == MOST else str(most)) + meaning

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        number = int(text) if re.fullmatch("-?[0-9]{1,18}", text) else None
        if number is None or not (self._least <= number <= self._most or number == self._absent):
            self.fail(_refusal(value, self._allowed), param, ctx)
        return number


class Real(click.ParamType):
    """A number from `least` to `most`, with or without a fraction: seconds, mostly."""

    name = "float"

    def __init__(self, least: float = 0.0, most: float = MOST_S, *, what: str = "seconds") -> None:
        self._least, self._most = least, most
        self._allowed = _range(what, f"{least:g}", f"{most:.0f}")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return value
        text = str(value).strip()
        number = float(text) if re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text) else math.nan
        if not self._least <= number <= self._most:
            self.fail(_refusal(value, self._allowed), param, ctx)
        return number


def _range(what: str, least: str, most: str | None) -> str:
    return f"{what}, {least} or more" if most is None else f"{what} from {least} to {most}"


def _refusal(value: Any, allowed: str) -> str:
    text = str(value)
    shown = repr(text if len(text) <= 40 else text[:40] + "...") if text else "nothing"
    return f"{shown} is not allowed; give {allowed}"


PORT = Whole(1, 65535)

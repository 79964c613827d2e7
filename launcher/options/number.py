"""Types of options that are numbers, with the same rules and messages for all such options."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from ...shared.sizes import read_size

MOST = 10**9  # limit of a count that has no other limit
MOST_S = 1e6  # eleven days; the kernel refuses a longer wait for a connection
_WHOLE = re.compile("-?[0-9]{1,18}")
_DECIMAL = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SHOWN_LENGTH = 40


class Whole(click.ParamType):  # type: ignore[type-arg] # generic since click 8.4
    """A whole number from `least` to `most`, in decimal digits.

    `absent`: a further allowed value, which scripts for DeepSpeed write to say that the option is not given.
    `meaning` is added to the allowed values, if they need an explanation.
    """

    name = "integer"

    def __init__(
        self, least: int = 0, most: int = MOST, *, absent: int | None = None, meaning: str = ""
    ) -> None:
        self._least, self._most, self._absent = least, most, absent
        self._allowed = f"a whole number from {least} to {most}{meaning}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Errors: click.BadParameter"""
        if isinstance(value, int):  # a default
            return value
        text = str(value).strip()
        number = int(text) if _WHOLE.fullmatch(text) else None
        if number is None or not (self._least <= number <= self._most or number == self._absent):
            self.fail(_refusal(value, self._allowed), param, ctx)
        return number


class Seconds(click.ParamType):  # type: ignore[type-arg] # as above
    """Seconds from `least` to `most`, with or without a fraction."""

    name = "float"

    def __init__(self, least: float = 0.0, most: float = MOST_S) -> None:
        self._least, self._most = least, most
        self._allowed = f"seconds from {least:g} to {most:.0f}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Errors: click.BadParameter"""
        if isinstance(value, int | float):  # a default
            return value
        text = str(value).strip()
        number = float(text) if _DECIMAL.fullmatch(text) else math.nan
        if not self._least <= number <= self._most:
            self.fail(_refusal(value, self._allowed), param, ctx)
        return number


class Size(click.ParamType):  # type: ignore[type-arg] # as above
    """A size in bytes, with a unit: GB counts in thousands, GiB in 1024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Errors: click.BadParameter"""
        if isinstance(value, int):  # a default
            return value
        num_bytes = read_size(str(value))
        if num_bytes is None:
            self.fail(_refusal(value, "a number with a unit, e.g. 24GB or 22.5GiB"), param, ctx)
        return num_bytes


PORT = Whole(1, 65535)


def _refusal(value: Any, allowed: str) -> str:
    text = str(value)
    shown = text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."
    return f"{shown!r} is not allowed; give {allowed}"

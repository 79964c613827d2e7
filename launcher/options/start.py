"""How the start is made fast, and shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """`window` counts the connections that are being made at the same time."""

    window: int = 64
    shows_timings: bool = False


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--connect_window"],
        type=click.IntRange(min=1),
        default=StartOptions().window,
        metavar="N",
        help="Make N connections at a time.  [default: 64]",
    ),
    click.Option(["--timings"], is_flag=True, help="Say at the end how long each phase of the start took."),
)


def read(given: dict[str, Any]) -> StartOptions:
    """The options of this file from all that were given, by parameter name."""
    return StartOptions(window=given["connect_window"], shows_timings=given["timings"])

"""Where the output of the ranks goes, and how it looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Where the output of the ranks goes, and how it looks."""


OPTIONS: tuple[click.Option, ...] = ()


def read(given: dict[str, Any]) -> LogOptions:
    """The options of this file from all that were given, by parameter name."""
    return LogOptions()

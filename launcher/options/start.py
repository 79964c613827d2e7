"""How the start is made fast, and shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """How the start is made fast, and shown."""


OPTIONS: tuple[click.Option, ...] = ()


def read(given: dict[str, Any]) -> StartOptions:
    """The options of this file from all that were given, by parameter name."""
    return StartOptions()

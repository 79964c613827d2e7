"""What happens after a failure: how often, and with which hosts, the job starts again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOptions:
    """What happens after a failure: how often, and with which hosts, the job starts again."""


OPTIONS: tuple[click.Option, ...] = ()


def read(given: dict[str, Any]) -> RestartOptions:
    """The options of this file from all that were given, by parameter name."""
    return RestartOptions()

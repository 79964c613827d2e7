"""Which CPU cores each rank is bound to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingOptions:
    """Which CPU cores each rank is bound to."""


OPTIONS: tuple[click.Option, ...] = ()


def read(given: dict[str, Any]) -> BindingOptions:
    """The options of this file from all that were given, by parameter name."""
    return BindingOptions()

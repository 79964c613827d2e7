"""The mode without SSH, in which the same command is started on every node by somebody else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousOptions:
    """The mode without SSH, in which the same command is started on every node by somebody else."""


OPTIONS: tuple[click.Option, ...] = ()


def read(given: dict[str, Any]) -> RendezvousOptions:
    """The options of this file from all that were given, by parameter name."""
    return RendezvousOptions()

"""How MPI, Slurm and pdsh are driven, where one of them starts the processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """How MPI, Slurm and pdsh are driven, where one of them starts the processes."""


OPTIONS: tuple[click.Option, ...] = ()


def read(given: dict[str, Any]) -> BackendOptions:
    """The options of this file from all that were given, by parameter name."""
    return BackendOptions()

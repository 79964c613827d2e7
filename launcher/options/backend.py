"""How MPI, Slurm and pdsh are driven, where one of them starts the processes."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

import click


class BackendOptions(NamedTuple):
    """How MPI, Slurm and pdsh are driven, where one of them starts the processes."""

    launcher_args: tuple[str, ...] = ()  # words for pdsh, mpirun or srun, as a shell would split them


def _split(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise click.BadParameter(
            f"{value!r} cannot be split into words: {error}; quote it as for a shell"
        ) from None


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--launcher_args"],
        default="",
        callback=_split,
        metavar="WORDS",
        help="Options for pdsh, mpirun or srun, in one word: --launcher_args='--mca btl tcp,self'.",
    ),
)


def read(given: dict[str, Any]) -> BackendOptions:
    """The options of this file from all that were given, by parameter name."""
    return BackendOptions(launcher_args=given["launcher_args"])

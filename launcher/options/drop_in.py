"""The package that a program gets when it imports deepspeed."""

from __future__ import annotations

from typing import NamedTuple

import click

from ...shared import variables
from ..inputs.env_file import EnvEntry
from .option import option, record

MODES = ("auto", "always", "never")


@record
class DropInOptions(NamedTuple):
    """`mode` None: the value of the variable in the shell, or auto."""

    mode: str | None = option(
        "--drop_in",
        topic="start",
        type=click.Choice(MODES),
        help=(
            "What `import deepspeed` gets in the job: dslaunch where no DeepSpeed is installed (auto), "
            "dslaunch everywhere (always), or only a DeepSpeed that is installed (never).  [default: "
            "$DSLAUNCH_DROP_IN or auto]"
        ),
    )

    def add_to(self, entries: tuple[EnvEntry, ...]) -> tuple[EnvEntry, ...]:
        """Add the mode to the workers' variables: a given mode comes last and wins over the shell and
        environment files; the default comes first, so that these win.
        """
        entry = EnvEntry(name=variables.DROP_IN, value=(self.mode or "auto",), source="--drop_in")
        return (entry, *entries) if self.mode is None else (*entries, entry)

"""What a program gets that imports deepspeed."""

from __future__ import annotations

from typing import NamedTuple

import click

from ...shared import variables
from ..inputs.env_file import EnvEntry
from .option import option, record

MODES = ("auto", "always", "never")


@record
class DropInOptions(NamedTuple):
    """`mode` None: what the variable says in the shell, or auto."""

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
        """Tell the workers, after what the shell and the environment files say if it was given,
        before that if not.
        """
        entry = EnvEntry(name=variables.DROP_IN, value=(self.mode or "auto",), source="--drop_in")
        return (entry, *entries) if self.mode is None else (*entries, entry)

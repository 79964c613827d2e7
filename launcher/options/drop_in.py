"""What a program gets that imports deepspeed."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from ...shared import variables
from ..inputs.env_file import EnvEntry

MODES = ("auto", "always", "never")


class DropInOptions(NamedTuple):
    """`mode` None: what the variable says in the shell, or auto."""

    mode: str | None = None

    def add_to(self, entries: tuple[EnvEntry, ...]) -> tuple[EnvEntry, ...]:
        """Tell the workers, after what the shell and the environment files say if it was given,
        before that if not.
        """
        entry = EnvEntry(name=variables.DROP_IN, value=(self.mode or "auto",), source="--drop_in")
        return (entry, *entries) if self.mode is None else (*entries, entry)


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--drop_in"],
        type=click.Choice(MODES),
        help=(
            "What `import deepspeed` gets in the job: dslaunch where no DeepSpeed is installed (auto), "
            "dslaunch everywhere (always), or only a DeepSpeed that is installed (never).  [default: "
            "$DSLAUNCH_DROP_IN or auto]"
        ),
    ),
)


def read(given: dict[str, Any]) -> DropInOptions:
    """The options of this file from all that were given, by parameter name."""
    return DropInOptions(mode=given["drop_in"])

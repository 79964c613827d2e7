"""Snapshots of a training in the memory of the hosts."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import LaunchError
from .backend import Launcher
from .number import MOST, MOST_S
from .option import option, record

_STEPS = re.compile("[0-9]{1,10}")
_SECONDS = re.compile(r"([0-9]{1,7}(?:\.[0-9]+)?)s")


def _every(value: str) -> str:
    """Read a number of steps, or of seconds with an s behind it."""
    text = value.strip()
    seconds = _SECONDS.fullmatch(text)
    if seconds is not None and 0 < float(seconds[1]) <= MOST_S:
        return f"{float(seconds[1]):g}s"
    if _STEPS.fullmatch(text) and 0 < int(text) <= MOST:
        return str(int(text))
    raise ValueError(f"{value[:200]!r} is not allowed; give a number of steps, as 20, or of seconds, as 30s")


@record
class SnapshotOptions(NamedTuple):
    """`every` is empty for a job without snapshots."""

    every: str = option(
        "--snapshot_every",
        topic="failures",
        default="",
        read=_every,
        metavar="N",
        help=(
            "Every N steps, or N seconds (30s), keep a training's state in the memory of its hosts, from "
            "which it goes on after a failure; for programs that train with dslaunch."
        ),
    )

    @property
    def is_on(self) -> bool:
        """Tell whether there are snapshots."""
        return bool(self.every)

    def check(self, launcher: Launcher, *, no_ssh: bool, may_start_again: bool, has_tree: bool) -> None:
        """Errors: LaunchError where snapshots would not be there at a restart"""
        if not self.is_on:
            return
        given = f"--snapshot_every={self.every}"
        if not may_start_again:
            raise LaunchError(
                f"{given} has no effect in a job that does not start again; add --max_restarts=3, or leave "
                "it out"
            )
        if no_ssh or launcher.starts_itself:
            why = "--no_ssh" if no_ssh else f"--launcher={launcher.name}"
            raise LaunchError(
                f"{given} has no effect with {why}, where no agent outlives the workers; leave it out"
            )
        if has_tree:
            raise LaunchError(
                f"{given} and --tree_above exclude each other: agents behind gateways end with each start of "
                "the job; leave out one of them"
            )

"""Options that make the start fast, and show it."""

from __future__ import annotations

from typing import NamedTuple

import click

from .number import Seconds, Whole
from .option import flag, option, record

CONNECT_WINDOW = 64  # the most connections that are made at the same time


def _module_names(value: str) -> tuple[str, ...] | None:
    if value in ("auto", "none"):
        return () if value == "none" else None
    names = tuple(one.strip() for one in value.split(","))
    if not all(part.isidentifier() for one in names for part in one.split(".")):
        raise click.UsageError(
            f"--preload={value}: not names of modules; write them with commas between, e.g. torch,numpy"
        )
    return names


@record
class StartOptions(NamedTuple):
    """`window` counts connections as CONNECT_WINDOW does."""

    # Modules to import before the fork; None: the script's own imports, where that is safe
    preload: tuple[str, ...] | None = option(
        "--preload",
        topic="start",
        read=_module_names,
        metavar="MODULES",
        help=(
            "Import these modules, e.g. torch, once on each host and fork its workers from there; `none`: "
            "each worker imports for itself.  [default: auto, torch where that is safe]"
        ),
    )
    prepare_timeout_s: float = option(
        "--prepare_timeout",
        topic="start",
        default=600.0,
        type=Seconds(1),
        metavar="S",
        help=(
            "Seconds in which a host must be ready to start: folder, --venv_script, "
            "--preload.  [default: 600]"
        ),
    )
    window: int = option(
        "--connect_window",
        topic="start",
        default=CONNECT_WINDOW,
        type=Whole(1),
        metavar="N",
        help="Make N connections at a time.  [default: 64]",
    )
    shows_timings: bool = flag("--timings", topic="output", help="Say how long each phase of the start took.")

"""How the start is made fast, and shown."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from .number import Seconds, Whole

CONNECT_WINDOW = 64  # connections being made at the same time


class StartOptions(NamedTuple):
    """`window` counts connections as CONNECT_WINDOW does."""

    window: int = CONNECT_WINDOW
    shows_timings: bool = False
    preload: tuple[str, ...] | None = None  # None: what the script imports, where that is safe
    prepare_timeout_s: float = 600.0


def _module_names(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    if value in (None, "auto", "none"):
        return () if value == "none" else None
    names = tuple(one.strip() for one in value.split(","))
    if not all(part.isidentifier() for one in names for part in one.split(".")):
        raise click.UsageError(
            f"--preload={value}: not names of modules; write them with commas between, e.g. torch,numpy"
        )
    return names


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--connect_window"],
        type=Whole(1),
        default=StartOptions().window,
        metavar="N",
        help="Make N connections at a time.  [default: 64]",
    ),
    click.Option(["--timings"], is_flag=True, help="Say how long each phase of the start took."),
    click.Option(
        ["--preload"],
        callback=_module_names,
        metavar="MODULES",
        help=(
            "Import these modules, e.g. torch, once on each host and fork its workers from there; `none`: "
            "each worker imports for itself.  [default: auto, torch where that is safe]"
        ),
    ),
    click.Option(
        ["--prepare_timeout"],
        type=Seconds(1),
        default=StartOptions().prepare_timeout_s,
        metavar="S",
        help=(
            "Seconds in which a host must be ready to start: folder, --venv_script, "
            "--preload.  [default: 600]"
        ),
    ),
)


def read(given: dict[str, Any]) -> StartOptions:
    """The options of this file from all that were given, by parameter name."""
    return StartOptions(
        window=given["connect_window"],
        shows_timings=given["timings"],
        preload=given["preload"],
        prepare_timeout_s=given["prepare_timeout"],
    )

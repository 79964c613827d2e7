"""What is looked at on all hosts before a job starts there."""

from __future__ import annotations

from typing import Any, NamedTuple

import click


class CheckOptions(NamedTuple):
    """`measures_gpus` and `measures_network` come after the look, and not without it."""

    is_on: bool = False
    measures_gpus: bool = False
    measures_network: bool = False


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--check"],
        is_flag=True,
        help="Look at all hosts before each start, as `dslaunch check`; without unfit ones if the job may.",
    ),
    click.Option(
        ["--check_gpu"],
        is_flag=True,
        help="The same, and have every GPU compute: one that is slow, or wrong, makes its host unfit.",
    ),
    click.Option(
        ["--check_bandwidth"],
        is_flag=True,
        help="The same, and measure the network between all hosts: a slow link makes a host unfit.",
    ),
)


def read(given: dict[str, Any]) -> CheckOptions:
    """The options of this file from all that were given, by parameter name."""
    gpus, network = given["check_gpu"], given["check_bandwidth"]
    return CheckOptions(is_on=given["check"] or gpus or network, measures_gpus=gpus, measures_network=network)

"""What is asked of the numbers of a job: how often they come, and where its events go."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from ..errors import LaunchError
from .number import Seconds

LEAST_INTERVAL_S = 0.1


class MetricsOptions(NamedTuple):
    """`interval_s` 0: the workers are asked for no numbers."""

    interval_s: float = 1.0
    events: str | None = None

    @property
    def has_own_interval(self) -> bool:
        """Whether numbers were asked for, at another interval than the usual one."""
        return self.interval_s not in (0.0, MetricsOptions().interval_s)


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--metrics_interval"],
        type=Seconds(0),
        default=MetricsOptions().interval_s,
        metavar="S",
        help="Have each rank tell loss, rate, times and memory once in S seconds; 0: never.  [default: 1]",
    ),
    click.Option(
        ["--events"],
        metavar="FILE",
        help="Write what happens, and those numbers, as JSON lines.",
    ),
)


def read(given: dict[str, Any]) -> MetricsOptions:
    """The options of this file from all that were given, by parameter name.

    Errors: LaunchError for an interval that is too short
    """
    interval_s = given["metrics_interval"]
    if 0 < interval_s < LEAST_INTERVAL_S:
        raise LaunchError(
            f"--metrics_interval={interval_s:g}: must be {LEAST_INTERVAL_S:g} or more, in seconds, or 0 for "
            "no numbers"
        )
    return MetricsOptions(interval_s=interval_s, events=given["events"])

"""The numbers of a job: their interval, the file of its events, the endpoint that serves them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import LaunchError
from ..inputs.host import is_ipv6
from .number import Seconds
from .option import option, record

LEAST_INTERVAL_S = 0.1
MOST_PORT = 65535
THIS_MACHINE = "127.0.0.1"


class ListenAddress(NamedTuple):
    """An address to listen on; port 0: any free port."""

    address: str
    port: int


def _place(value: str) -> ListenAddress:
    """Read PORT, ADDRESS:PORT or [IPV6]:PORT."""
    address, _, port = value.strip().rpartition(":")
    if is_ipv6(address[1:-1]) and address[:1] + address[-1:] == "[]":
        address = address[1:-1]
    elif not re.fullmatch(r"[A-Za-z0-9_.-]{0,253}", address) or value.startswith(":"):
        address = "?"
    number = int(port) if re.fullmatch("[0-9]{1,5}", port) else -1
    if address == "?" or not 0 <= number <= MOST_PORT:
        raise ValueError(
            f"{value[:200]!r} is no port; give one from 1 to {MOST_PORT}, or 0 for any that is free, "
            "e.g. 9400, and 0.0.0.0:9400 or [::]:9400 to be reached from other machines"
        )
    return ListenAddress(address or THIS_MACHINE, number)


@record
class MetricsOptions(NamedTuple):
    """`interval_s` 0: the workers are asked for no numbers."""

    events: str | None = option(
        "--events",
        topic="output",
        metavar="FILE",
        help="Write what happens, and those numbers, as JSON lines.",
    )
    interval_s: float = option(
        "--metrics_interval",
        topic="output",
        default=1.0,
        type=Seconds(0),
        metavar="S",
        help="Have each rank tell loss, rate, times and memory once in S seconds; 0: never.  [default: 1]",
    )
    endpoint: ListenAddress | None = option(
        "--metrics_port",
        topic="output",
        read=_place,
        metavar="[ADDRESS:]PORT",
        help="Show those numbers to Prometheus at http://ADDRESS:PORT/metrics; without ADDRESS to this "
        "machine only.",
    )

    @property
    def has_own_interval(self) -> bool:
        """Tell whether an interval other than the usual one was asked for."""
        return self.interval_s not in (0.0, MetricsOptions().interval_s)

    def refuse(self, why: str) -> None:
        """Errors: LaunchError if an endpoint was asked for where there are no numbers to show"""
        if self.endpoint is not None:
            raise LaunchError(f"--metrics_port has no effect with {why}; leave it out")

    def settled(self, given: Mapping[str, Any]) -> MetricsOptions:
        """Settle the options. Errors: LaunchError for an interval that is too short"""
        if 0 < self.interval_s < LEAST_INTERVAL_S:
            raise LaunchError(
                f"--metrics_interval={self.interval_s:g}: must be {LEAST_INTERVAL_S:g} or more, in seconds, "
                "or 0 for no numbers"
            )
        return self

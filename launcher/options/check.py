"""Checks of all hosts before a job starts there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .option import flag, record


@record
class CheckOptions(NamedTuple):
    """`measures_gpus` and `measures_network` ask for measurements after the check, and need it."""

    is_on: bool = flag(
        "--check",
        topic="start",
        help="Look at all hosts before each start, as `dslaunch check`; without unfit ones if the job may.",
    )
    measures_gpus: bool = flag(
        "--check_gpu",
        topic="start",
        help="The same, and have every GPU compute: one that is slow, or wrong, makes its host unfit.",
    )
    measures_network: bool = flag(
        "--check_bandwidth",
        topic="start",
        help="The same, and measure the network between all hosts: a slow link makes a host unfit.",
    )

    def settled(self, given: Mapping[str, Any]) -> CheckOptions:
        return self._replace(is_on=self.is_on or self.measures_gpus or self.measures_network)

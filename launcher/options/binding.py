"""The CPU cores that each rank is bound to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..node.observe.core_binding import parse_ranges
from .option import flag, option, record

MAX_DIGITS = 5  # Linux has fewer than 10,000 cores


def _cores(value: str) -> tuple[int, ...]:
    """Read a list of cores, ascending and without repetition. Source: DeepSpeed 0.19.8 utils/numa.py,
    `parse_range_list`
    """
    number = f"[0-9]{{1,{MAX_DIGITS}}}"  # a range of larger numbers might not fit into memory
    if not re.fullmatch(f"{number}(-{number})?(,{number}(-{number})?)*", value):
        raise ValueError(
            f"{value[:80]!r} is not a list of cores, which are numbers of at most {MAX_DIGITS} digits; write "
            "e.g. 0,2-4"
        )
    items = value.split(",")
    bounds = [int(one) for item in items for one in (item.split("-") * 2)[:2]]
    is_ascending = all(low < high for low, high in zip(bounds[1::2], bounds[2::2], strict=False))
    if not is_ascending or any(low > high for low, high in zip(bounds[::2], bounds[1::2], strict=True)):
        raise ValueError(f"{value!r} must ascend and name no core twice; write e.g. 0,2-4")
    return tuple(parse_ranges(value))


@record
class BindingOptions(NamedTuple):
    """`cores` is None without binding, empty for all cores that the host allows."""

    is_on: bool = flag(
        "--bind_cores_to_rank",
        topic="start",
        help=(
            "Bind each rank to its share of the host's cores, near its GPU if there is one, and set "
            "OMP_NUM_THREADS to their number. Memory is not bound."
        ),
    )
    cores: tuple[int, ...] | None = option(
        "--bind_core_list",
        topic="start",
        needs="--bind_cores_to_rank",
        read=_cores,
        metavar="CORES",
        help="Share these cores only, e.g. 0,2-4.  [default: one CPU of each physical core]",
    )

    def settled(self, given: Mapping[str, Any]) -> BindingOptions:
        return self._replace(cores=self.cores or ()) if self.is_on else self

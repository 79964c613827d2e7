"""Which CPU cores each rank is bound to."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import click

from ..errors import LaunchError
from ..node.observe.core_binding import parse_ranges

MAX_DIGITS = 5  # Linux has fewer than 10,000 cores


class BindingOptions(NamedTuple):
    """`cores` is None without binding, empty for all cores that the host allows."""

    cores: tuple[int, ...] | None = None


def _cores(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Source: DeepSpeed 0.19.8 utils/numa.py, `parse_range_list`: ascending, nothing twice."""
    if value is None:
        return None
    number = f"[0-9]{{1,{MAX_DIGITS}}}"  # a range of more would not fit into memory
    if not re.fullmatch(f"{number}(-{number})?(,{number}(-{number})?)*", value):
        raise click.BadParameter(
            f"{value[:80]!r} is not a list of cores, which are numbers of at most {MAX_DIGITS} digits; write "
            "e.g. 0,2-4"
        )
    items = value.split(",")
    bounds = [int(one) for item in items for one in (item.split("-") * 2)[:2]]
    is_ascending = all(low < high for low, high in zip(bounds[1::2], bounds[2::2], strict=False))
    if not is_ascending or any(low > high for low, high in zip(bounds[::2], bounds[1::2], strict=True)):
        raise click.BadParameter(f"{value!r} must ascend and name no core twice; write e.g. 0,2-4")
    return tuple(parse_ranges(value))


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--bind_cores_to_rank"],
        is_flag=True,
        help=(
            "Bind each rank to its share of the host's cores, near its GPU if there is one, and set "
            "OMP_NUM_THREADS to their number. Memory is not bound."
        ),
    ),
    click.Option(
        ["--bind_core_list"],
        metavar="CORES",
        callback=_cores,
        help="Share these cores only, e.g. 0,2-4.  [default: one CPU of each physical core]",
    ),
)


def read(given: dict[str, Any]) -> BindingOptions:
    """The options of this file from all that were given, by parameter name.

    Errors: LaunchError if a list is given that nothing is bound to
    """
    cores: tuple[int, ...] | None = given["bind_core_list"]
    if not given["bind_cores_to_rank"]:
        if cores is not None:
            raise LaunchError("--bind_core_list has no effect by itself; add --bind_cores_to_rank")
        return BindingOptions()
    return BindingOptions(cores=cores or ())

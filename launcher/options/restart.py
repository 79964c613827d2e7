"""What happens after a failure: how often, and with which hosts, the job starts again."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from ..errors import LaunchError
from .hosts import NODE_LIMIT
from .number import Seconds, Whole

ELASTIC_RESTARTS = 100  # what --elastic_training alone means


class RestartOptions(NamedTuple):
    """`min_nodes` and `max_nodes` are None if not given; `spares` counts hosts beyond
    those that take part.
    """

    max_restarts: int = 0
    min_nodes: int | None = None
    max_nodes: int | None = None
    spares: int = 0
    min_uptime_s: float = 10.0

    @property
    def is_on(self) -> bool:
        """Whether a job may go on after a failure, or start without some of its hosts."""
        return self.max_restarts > 0 or self.spares > 0 or self.min_nodes is not None


OPTIONS: tuple[click.Option, ...] = (
    click.Option(
        ["--max_restarts"],
        type=Whole(),
        metavar="N",
        help="After a failure start the job again, N times.  [default: 0]",
    ),
    click.Option(
        ["--spares"],
        type=Whole(),
        default=0,
        metavar="K",
        help=(
            "Keep K hosts, those behind --num_nodes or the last ones; one takes the place, and the ranks, of "
            "a host that fails."
        ),
    ),
    click.Option(
        ["--min_nodes", "--min_elastic_nodes"],
        type=NODE_LIMIT,
        metavar="N",
        help="Go on with fewer hosts when one fails and no spare is left, but not with fewer than N.",
    ),
    click.Option(
        ["--max_nodes", "--max_elastic_nodes"],
        type=NODE_LIMIT,
        metavar="N",
        help="Use N hosts at most; the others are spares. A job with fewer takes hosts in while it runs.",
    ),
    click.Option(
        ["--min_uptime"],
        type=Seconds(),
        default=RestartOptions().min_uptime_s,
        metavar="S",
        help="Do not start again what failed within S seconds of its start.  [default: 10]",
    ),
    click.Option(
        ["--elastic_training"],
        is_flag=True,
        help=f"The same as --max_restarts={ELASTIC_RESTARTS} --min_nodes=1, unless they are given.",
    ),
)


def read(given: dict[str, Any]) -> RestartOptions:
    """The options of this file from all that were given, by parameter name. -1 means not given,
    as with DeepSpeed.

    Errors: LaunchError if they contradict each other
    """
    is_elastic = given["elastic_training"]
    min_nodes, max_nodes = (None if given[one] == -1 else given[one] for one in ("min_nodes", "max_nodes"))
    if is_elastic and min_nodes is None:
        min_nodes = 1
    if min_nodes is not None and max_nodes is not None and min_nodes > max_nodes:
        raise LaunchError(
            f"--min_nodes={min_nodes} is more than --max_nodes={max_nodes}; make the first one smaller"
        )
    restarts = given["max_restarts"]
    return RestartOptions(
        max_restarts=(ELASTIC_RESTARTS if is_elastic else 0) if restarts is None else restarts,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        spares=given["spares"],
        min_uptime_s=given["min_uptime"],
    )

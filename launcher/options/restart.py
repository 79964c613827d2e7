"""The reaction to a failure: how often, and with which hosts, the job starts again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import LaunchError
from .hang_limit import GivenLimits, read_limits
from .hosts import NODE_LIMIT
from .number import Seconds, Whole
from .option import flag, option, record

ELASTIC_RESTARTS = 100  # number of restarts if only --elastic_training is given


@record
class RestartOptions(NamedTuple):
    """`min_nodes`, `max_nodes`: None if not given; `spares` counts hosts beyond those that take part."""

    max_restarts: int = option(
        "--max_restarts",
        topic="failures",
        default=0,
        type=Whole(),
        metavar="N",
        help="After a failure start again, N times.  [default: 0]",
    )
    min_uptime_s: float = option(
        "--min_uptime",
        topic="failures",
        default=10.0,
        type=Seconds(),
        metavar="S",
        help="Do not start again what failed within S seconds of its start.  [default: 10]",
    )
    # None: learned in a job that may start again, else off
    hang_limit: GivenLimits | None = option(
        "--hang_limit",
        topic="failures",
        read=read_limits,
        metavar="LIMITS",
        help=(
            "End a job that stands still for longer, and name the rank that the others wait for: seconds for "
            "some of start, load, step, save, evaluation and generation, such as step=60,save=600, or "
            "`learned`, or `off`.  [default: learned, if it may start again]"
        ),
    )
    spares: int = option(
        "--spares",
        topic="elastic",
        default=0,
        type=Whole(),
        metavar="K",
        help=(
            "Keep K hosts, those behind --num_nodes or the last ones; one takes the place, and the ranks, of "
            "a host that fails."
        ),
    )
    min_nodes: int | None = option(
        "--min_nodes",
        deepspeed="--min_elastic_nodes",
        topic="elastic",
        type=NODE_LIMIT,
        absent=-1,
        metavar="N",
        help="Go on with fewer hosts when one fails and no spare is left, but not with fewer than N.",
    )
    max_nodes: int | None = option(
        "--max_nodes",
        deepspeed="--max_elastic_nodes",
        topic="elastic",
        type=NODE_LIMIT,
        absent=-1,
        metavar="N",
        help="Use N hosts at most; the others are spares. A job with fewer takes hosts in while it runs.",
    )
    is_elastic: bool = flag(
        "--elastic_training",
        topic="elastic",
        help=f"The same as --max_restarts={ELASTIC_RESTARTS} --min_nodes=1, unless they are given.",
    )

    @property
    def is_on(self) -> bool:
        """Tell whether a job may go on after a failure, or start without some of its hosts."""
        return self.max_restarts > 0 or self.spares > 0 or self.min_nodes is not None

    def settled(self, given: Mapping[str, Any]) -> RestartOptions:
        """Settle the options. Errors: LaunchError if they contradict each other"""
        made = self
        if self.is_elastic:
            restarts = ELASTIC_RESTARTS if given["max_restarts"] is None else self.max_restarts
            made = self._replace(max_restarts=restarts, min_nodes=self.min_nodes or 1)
        if made.min_nodes is not None and made.max_nodes is not None and made.min_nodes > made.max_nodes:
            raise LaunchError(
                f"--min_nodes={made.min_nodes} is more than --max_nodes={made.max_nodes}; make the first one "
                "smaller"
            )
        return made

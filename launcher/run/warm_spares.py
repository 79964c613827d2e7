"""Spares whose agents run before they are needed, for to reach a host and start an agent takes time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from ..backends.bootstrap import AgentParts
from ..backends.choose import direct_connect
from ..backends.refused_before import RefusedBefore
from ..controller.kept_agents import KeptAgents
from ..errors import LaunchError
from ..inputs.selection import Selected
from ..job.plan import NodePlan, Plan, job_of
from ..options import Options
from ..wire.frames import Prepare
from ..wire.job import as_json
from .host_pool import nodes_of

WARM_AFTER_S = 2.0  # from the beginning of an attempt, whose own hosts are connected first
MAX_WARM = 2  # spares: more hosts are seldom lost at once


@contextlib.contextmanager
def warm_spares(
    options: Options,
    spares: Sequence[Selected],
    kept: KeptAgents,
    *,
    plan: Plan,
    refused: RefusedBefore,
    tell: Callable[[str], None],
) -> Iterator[None]:
    """Have agents of the first spares wait in `kept` while the attempt inside runs; `tell` gets a line for
    each.
    """
    wanted = tuple((one, len(one.devices)) for one in spares[:MAX_WARM])
    is_over = threading.Event()
    parts = AgentParts(moves_files=options.moves_files, holds_memory=bool(plan.snapshot_every))

    def connect() -> None:
        if is_over.wait(WARM_AFTER_S):
            return
        nodes = [one for one in nodes_of(wanted, options) if not kept.has(one.host.name)]
        # A spare that cannot be reached is reported when it is needed
        with contextlib.suppress(LaunchError):
            way = direct_connect(options, nodes, say=lambda line: None, refused=refused)
            for node in nodes:
                if not is_over.is_set():
                    kept.connect(
                        node, connect=way, parts=parts, prepare=_preparation(plan, node, options), tell=tell
                    )

    threading.Thread(target=connect, name="spares", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _preparation(plan: Plan, node: NodePlan, options: Options) -> Prepare | None:
    """Return the preparation of a spare as if its ranks were those of the last host; None where the files of
    the job come only with an attempt.
    """
    if options.sync.is_on:
        return None
    ranks = plan.nodes[-1].ranks[: len(node.devices)]
    job = job_of(plan, node._replace(node_rank=1, ranks=ranks))
    return Prepare(as_json(job._replace(save_pid=None, holds_memory=False)))

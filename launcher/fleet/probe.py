"""A look at hosts before there is a job: which of them answer, and their agents' facts about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..backends.channel import Channel
from ..controller.link import LinkEnd
from ..controller.roster import HostState, Roster
from ..job.plan import NodePlan
from ..wire.frames import Hello

# Time limit of a connection, and of the answer after it; each step of a connection has a shorter limit.
ANSWER_TIMEOUT_S = 60.0
POLL_S = 0.2


def probe(
    nodes: Sequence[NodePlan],
    connect: Callable[[NodePlan], Channel],
    *,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> dict[int, Hello | str]:
    """Return each host's facts from its agent, or one sentence why there is no agent, by node_rank in the
    given order.

    All hosts are asked at the same time. Only name and login of a node are used, so its devices and ranks may
    be empty. No process is left on any host when this returns or is interrupted.
    """
    answers: dict[HostState, Hello | str] = {}
    with Roster(
        nodes,
        connect=connect,
        silence_s=timeout_s,
        hello_timeout_s=timeout_s,
        enter_timeout_s=timeout_s,
        connect_timeout_s=timeout_s,
    ) as roster:
        while len(answers) < len(roster):
            event = roster.next(POLL_S)
            if event is not None and isinstance(event.item, Hello):
                answers[event.host] = event.item
                roster.leave(event.host)
            elif event is not None and isinstance(event.item, LinkEnd):
                answers[event.host] = event.item.message
        return {host.plan.node_rank: answers[host] for host in roster}

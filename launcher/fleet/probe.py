"""A look at hosts before there is a job: which of them answer, and what their agents say of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from ..backends.channel import Channel
from ..controller.controller import CONNECT_WINDOW
from ..controller.link import Link, LinkEnd
from ..job.plan import NodePlan
from ..wire.frames import Frame, Hello

ANSWER_TIMEOUT_S = 60.0  # of silence from all hosts; making a connection has timeouts of its own


def probe(
    nodes: Sequence[NodePlan],
    connect: Callable[[NodePlan], Channel],
    *,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> dict[int, Hello | str]:
    """What each host's agent says of its host, or one sentence why there is no agent, by node_rank in the given order.

    All hosts are asked at the same time; `timeout_s` counts from the last answer. Only who and where of a node is
    used, so its devices and ranks may be empty. Nothing is left on any host when this returns or is interrupted.
    """
    events: queue.SimpleQueue[tuple[int, Frame | LinkEnd]] = queue.SimpleQueue()
    window = threading.BoundedSemaphore(CONNECT_WINDOW)
    links = {node.node_rank: Link(node, connect=connect, window=window) for node in nodes}
    answers: dict[int, Hello | str] = {}

    def deliver_for(node_rank: int) -> Callable[[Frame | LinkEnd, float], None]:
        return lambda item, at_s: events.put((node_rank, item))

    try:
        for node_rank, link in links.items():
            link.start(deliver_for(node_rank))
        while len(answers) < len(links):
            try:
                node_rank, item = events.get(timeout=timeout_s)
            except queue.Empty:
                break
            if isinstance(item, Hello):
                answers.setdefault(node_rank, item)
                links[node_rank].abandon()
            elif isinstance(item, LinkEnd):
                answers.setdefault(node_rank, item.message)
    finally:
        for link in links.values():
            link.abandon()
        for link in links.values():
            link.close()
    silent = (
        f"no agent answered within {timeout_s:g} s; is the host overloaded, or does its login script wait?"
    )
    return {node_rank: answers.get(node_rank, silent) for node_rank in links}

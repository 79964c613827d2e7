"""Frames that contradict the protocol. A host that sends one is given up with that reason; it never stops the
work on the others.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from ..node.observe.metrics import FOLDED
from ..wire.frames import (
    Chunk,
    Collected,
    Done,
    Exited,
    Facts,
    Found,
    Frame,
    Healthy,
    Hello,
    Leaving,
    Listening,
    Metrics,
    Milestone,
    Note,
    Output,
    Pong,
    Problem,
    Reached,
    Ready,
    Stacks,
    Started,
    Synced,
    SyncWant,
    Told,
    Took,
)

UP = (
    Chunk,
    Collected,
    Done,
    Exited,
    Facts,
    Found,
    Healthy,
    Hello,
    Leaving,
    Listening,
    Metrics,
    Milestone,
    Note,
    Output,
    Pong,
    Problem,
    Reached,
    Ready,
    Stacks,
    Started,
    Synced,
    SyncWant,
    Told,
    Took,
)
MAX_EXIT_CODE = 255
MAX_PORT = 65535


class Phase(Enum):
    """CONNECTING until the host's Hello; then PREPARING; RUNNING after its Start; STOPPING at the end."""

    CONNECTING = 1
    PREPARING = 2
    RUNNING = 3
    STOPPING = 4


def contradiction(
    item: Frame, *, phase: Phase, ranks: Collection[int], num_ended: int = 0, is_first: bool = False
) -> str:
    """Return why an agent with these ranks cannot have said this now; empty if it can.

    `num_ended` of them ended before.
    """
    kind = type(item).__name__
    if not isinstance(item, UP):
        return f"its agent sent {kind}, which only a launcher sends"
    is_before_start = phase in (Phase.CONNECTING, Phase.PREPARING)
    if is_before_start and isinstance(
        item, Done | Exited | Healthy | Leaving | Metrics | Milestone | Note | Output | Started | Told
    ):
        return f"its agent sent {kind} before the start"
    if phase is Phase.CONNECTING and not isinstance(item, Hello):
        return f"its agent sent {kind} before Hello"
    wrong = _wrong_value(item, ranks)
    if wrong:
        return f"its agent sent {kind} with {wrong}"
    if isinstance(item, Listening) and not is_first:
        return f"its agent sent {kind}, but it is not the first host"
    if phase is Phase.RUNNING and isinstance(item, Done) and num_ended < len(ranks):
        return f"its agent sent {kind}, but {len(ranks) - num_ended} of its workers did not end"
    return ""


def _wrong_value(item: Frame, ranks: Collection[int]) -> str:
    if (
        isinstance(item, Started | Exited | Healthy | Output | Stacks | Milestone | Told)
        and item.rank not in ranks
    ):
        return f"rank {item.rank}, which is not on this host"
    if isinstance(item, Metrics):
        known = {str(rank) for rank in ranks}
        strange = [one for one in item.ranks if one != FOLDED and one not in known]
        return f"rank {strange[0]}, which is not on this host" if strange else ""
    if isinstance(item, Output) and item.stream not in (1, 2):
        return f"stream {item.stream}"
    if isinstance(item, Exited) and not 0 <= item.code <= MAX_EXIT_CODE:
        return f"exit code {item.code}"
    if isinstance(item, Problem) and not 1 <= item.exit_code <= MAX_EXIT_CODE:
        return f"exit code {item.exit_code}"
    if isinstance(item, Ready | Listening):
        port = item.master_port if isinstance(item, Ready) else item.port
        return "" if 0 <= port <= MAX_PORT else f"port {port}"
    return ""

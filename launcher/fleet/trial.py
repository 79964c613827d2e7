"""Trials of hosts that do not take part in a job: made while it runs, without disturbing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..backends.channel import Channel
from ..controller.link import LinkEnd
from ..controller.roster import HostState, Roster
from ..job.plan import NodePlan
from ..options.elastic import ElasticOptions
from ..wire.frames import Facts, Hello, Inspect

ANSWER_TIMEOUT_S = 20.0  # for a connection and for each answer
POLL_S = 0.1


class Trial(NamedTuple):
    """The result for one host: its first frame, or why there is none; whether it is told to leave."""

    hello: Hello | None
    why_not: str  # empty if the host can be used

    @property
    def is_good(self) -> bool:
        return not self.why_not


def try_hosts(
    nodes: Sequence[NodePlan],
    connect: Callable[[NodePlan], Channel],
    notice: ElasticOptions,
    *,
    is_over: Callable[[], bool],
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> dict[int, Trial]:
    """Return the result of each host, by node_rank; those that have not answered when `is_over` are left out.

    All are tried at the same time, and no process is left on any when this returns.
    """
    found: dict[HostState, Trial] = {}
    question = Inspect("notice", {"file": notice.notice_file, "command": notice.notice_command})
    asks = notice.notice_file is not None or notice.notice_command is not None
    until = time.monotonic() + 2 * timeout_s
    with Roster(
        nodes,
        connect=connect,
        silence_s=timeout_s,
        hello_timeout_s=timeout_s,
        connect_timeout_s=timeout_s,
    ) as roster:
        while len(found) < len(roster) and not is_over() and time.monotonic() < until:
            event = roster.next(POLL_S)
            if event is None:
                continue
            host, item = event.host, event.item
            if isinstance(item, Hello) and asks:
                host.send(question)
            elif isinstance(item, Hello | Facts):
                found[host] = _of(host.hello, item)
                roster.leave(host)
            elif isinstance(item, LinkEnd):
                found[host] = Trial(None, item.message)
    return {host.plan.node_rank: trial for host, trial in found.items()}


def _of(hello: Hello | None, answer: Hello | Facts) -> Trial:
    facts = answer.facts if isinstance(answer, Facts) else {}
    why = facts.get("error") or facts.get("why") or ""
    return Trial(hello, str(why))

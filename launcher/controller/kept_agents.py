"""Agents that wait for an attempt of a job, by host: those of the attempt before, and of spares.

The next attempt takes an agent with its open link, as if the host had just been connected. What breaks
meanwhile is let go, and the host is connected as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

from ..backends.bootstrap import AgentParts
from ..backends.channel import Channel
from ..inputs.host import Host
from ..job.plan import NodePlan
from ..wire.frames import Facts, Frame, Hello, ImportAhead, Ping, Pong, Prepare, Reached, Ready, encode
from .link import Link, LinkEnd
from .pulse import MAX_PING_EVERY_S

_LATE = (Pong, Reached, Facts)  # answers to questions of the attempt that is over


class KeptAgent(NamedTuple):
    """An agent that waits for a job. `hello` was its first word."""

    link: Link
    hello: Hello


class _Kept(NamedTuple):
    agent: KeptAgent
    node: NodePlan


class KeptAgents:
    """The agents that are kept now. They are pinged, so they know that the launcher lives."""

    def __init__(self, *, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}  # by the host's name
        self._connecting: dict[str, Link] = {}  # to spares, by their names
        self._preparing: set[str] = set()  # names of spares that do not wait yet
        self._closing: list[Link] = []
        self._is_closed = threading.Event()
        self._pinging: threading.Thread | None = None

    def add(self, node: NodePlan, link: Link, hello: Hello) -> None:
        """Keep an agent on whose host nothing of the job is left, or was begun."""
        one = _Kept(KeptAgent(link, hello), node)
        with self._lock:
            before = self._kept.get(node.host.name)
            self._kept[node.host.name] = one
        if before is not None:
            self._let_go(before.agent.link)
        link.hand_over(node, self._deliver_for(one))
        if self._pinging is None:
            self._pinging = threading.Thread(target=self._ping, name="ping of kept agents", daemon=True)
            self._pinging.start()

    def has(self, name: str) -> bool:
        """Tell whether an agent of that host waits, or is being started."""
        with self._lock:
            return name in self._kept or name in self._connecting

    def connect(
        self,
        node: NodePlan,
        *,
        connect: Callable[[NodePlan], Channel],
        parts: AgentParts,
        prepare: Prepare | None,
        tell: Callable[[str], None],
    ) -> None:
        """Connect to a spare in the background, and have it import what its workers would share, if it can be
        prepared. `tell` gets a line when its agent waits. If that fails, nothing is said: an attempt that
        needs the host connects as ever.
        """
        link = Link(node, connect=connect, window=threading.BoundedSemaphore(1), parts=parts)
        name = node.host.name

        def deliver(item: Frame | LinkEnd, at_s: float) -> None:
            with self._lock:
                is_wanted = self._connecting.get(name) is link
                if is_wanted:
                    del self._connecting[name]
            if is_wanted and isinstance(item, Hello):
                if prepare is not None:
                    self._preparing.add(name)
                self.add(node, link, item)
                if prepare is not None:
                    link.send(encode(prepare))
                tell(f"{name}: agent {item.pid} waits, in case a host is lost")
            elif is_wanted:
                self._let_go(link)

        with self._lock:
            if self._is_closed.is_set():
                return
            self._connecting[name] = link
        link.start(deliver)

    def take(self, node: NodePlan) -> KeptAgent | None:
        """Return the agent of this host, which is kept no more; None if it must be connected."""
        with self._lock:
            one = self._kept.pop(node.host.name, None)
            coming = self._connecting.pop(node.host.name, None)
        if coming is not None:
            self._let_go(coming)
        if one is None:
            return None
        is_fit = self._is_fit(one, node)
        self._preparing.discard(node.host.name)
        if not is_fit:
            self._let_go(one.agent.link)
            return None
        return one.agent

    def leave_only(self, names: Collection[str]) -> None:
        """Let go the agents of other hosts than these."""
        with self._lock:
            others = [self._kept.pop(name).agent.link for name in [*self._kept] if name not in names]
            others += [self._connecting.pop(name) for name in [*self._connecting] if name not in names]
        for link in others:
            self._let_go(link)

    def close(self) -> None:
        """End the agents that nobody has taken; wait until no process or file of them is left on this
        machine.
        """
        with self._lock:
            self._is_closed.set()
        self.leave_only(())
        for link in self._closing:
            link.close()
        self._closing.clear()

    def _is_fit(self, one: _Kept, node: NodePlan) -> bool:
        """Tell whether it is heard, and was started as the agent of this node would be."""
        link = one.agent.link
        takes_stdin = one.node.stdin_rank is not None, node.stdin_rank is not None
        is_same = _way_to(one.node.host) == _way_to(node.host) and takes_stdin[0] == takes_stdin[1]
        is_same = is_same and node.host.name not in self._preparing
        return is_same and link.is_open and link.silent_s() < self._heartbeat_s / 2

    def _let_go(self, link: Link) -> None:
        link.abandon()
        self._closing.append(link)

    def _deliver_for(self, one: _Kept) -> Callable[[Frame | LinkEnd, float], None]:
        def deliver(item: Frame | LinkEnd, at_s: float) -> None:
            if isinstance(item, _LATE):
                return
            if isinstance(item, Ready) and one.node.host.name in self._preparing:
                self._preparing.discard(one.node.host.name)
                one.agent.link.send(encode(ImportAhead()))
                return
            with self._lock:  # it has ended, or says something that is not said between attempts
                if self._kept.get(one.node.host.name) is not one:
                    return
                del self._kept[one.node.host.name]
            self._let_go(one.agent.link)

        return deliver

    def _ping(self) -> None:
        number, every_s = 0, min(self._heartbeat_s / 4, MAX_PING_EVERY_S)
        while not self._is_closed.wait(every_s):
            number += 1
            with self._lock:
                kept = [*self._kept.values()]
            for one in kept:
                one.agent.link.send(encode(Ping(number)))


def _way_to(host: Host) -> Host:
    """Return what decides how its agent is started."""
    return host._replace(slots=None, devices=None, cwd=None, env=(), role="")

"""Agents on many hosts without a job: each is on its own, and none holds up the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from ..backends.channel import Channel
from ..controller.link import Link, LinkEnd
from ..controller.pulse import Pulse
from ..job.plan import NodePlan
from ..wire.frames import Frame, Hello, Ping, encode

CONNECT_WINDOW = 64  # connections being made at the same time
PING_EVERY_S = 2.0
LOOK_EVERY_S = 0.2  # for silence
CONNECT_TIMEOUT_S = 60.0  # all steps of a connection together; each has a shorter one of its own
SILENCE_S = 10.0  # after which a connected host counts as lost


class Event(NamedTuple):
    """Something one host said, or LinkEnd: it is lost, and nothing more comes of it."""

    node_rank: int
    item: Frame | LinkEnd
    at_s: float


class Fleet:
    """As a context manager, with all connections made in the background; at its end nothing is left on any host."""

    def __init__(
        self,
        nodes: Sequence[NodePlan],
        connect: Callable[[NodePlan], Channel],
        *,
        window: int = CONNECT_WINDOW,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._connect = connect
        self._connect_timeout_s = connect_timeout_s
        self._silence_s = silence_s
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._connecting_since: dict[int, float] = {}
        self._greeted: set[int] = set()
        self._lost: set[int] = set()
        self._pinged_at = time.monotonic()
        self._looked_at = 0.0
        self._pulse = Pulse(LOOK_EVERY_S)
        places = threading.BoundedSemaphore(window)
        self.links = {
            node.node_rank: Link(node, connect=self._timed_connect, window=places) for node in nodes
        }

    def __enter__(self) -> Fleet:
        for node_rank, link in self.links.items():
            link.start(self._deliver_for(node_rank))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self.links.values():
            link.abandon()
        for node_rank, link in self.links.items():
            if node_rank not in self._lost:
                link.close()

    def send(self, node_rank: int, frame: Frame) -> None:
        if node_rank not in self._lost:
            self.links[node_rank].send(encode(frame))

    def connecting_since(self, node_rank: int) -> float | None:
        """When its connection was begun; None while it waits for its turn."""
        return self._connecting_since.get(node_rank)

    def lose(self, node_rank: int) -> None:
        """Give a host up: nothing more comes of it, and nobody waits for its end."""
        self._lost.add(node_rank)
        self.links[node_rank].abandon()

    def next(self, timeout_s: float) -> Event | None:
        """The next thing that a host said, or None. Must be called again and again: it also notices silence."""
        self._pulse.beat()
        if self._pulse.take_gap_s():  # this process stood still: nobody's silence counts before now
            for link in self.links.values():
                link.forgive_silence()
        self._ping()
        for node_rank, message in self._silent():
            self.lose(node_rank)
            return Event(node_rank, LinkEnd(message), time.monotonic())
        try:
            event = self._events.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if event.node_rank in self._lost:
            return None
        if isinstance(event.item, Hello):
            self._greeted.add(event.node_rank)
        elif isinstance(event.item, LinkEnd):
            self.lose(event.node_rank)
        return event

    def _timed_connect(self, node: NodePlan) -> Channel:
        self._connecting_since[node.node_rank] = time.monotonic()
        return self._connect(node)

    def _deliver_for(self, node_rank: int) -> Callable[[Frame | LinkEnd, float], None]:
        return lambda item, at_s: self._events.put(Event(node_rank, item, at_s))

    def _ping(self) -> None:
        now = time.monotonic()
        if now - self._pinged_at >= PING_EVERY_S:
            self._pinged_at = now
            for node_rank in self._greeted:
                self.send(node_rank, Ping(0))

    def _silent(self) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        now = time.monotonic()
        if now - self._looked_at < LOOK_EVERY_S:
            return found
        for node_rank, link in self.links.items():
            if node_rank in self._lost:
                continue
            since = self._connecting_since.get(node_rank)
            if link.is_open and link.silent_s() > self._silence_s:
                how = "nothing was heard" if node_rank in self._greeted else "no agent answered"
                why = "the host is overloaded, or its network or agent is down"
                found.append((node_rank, f"connected, then {how} for {self._silence_s:g} s; {why}"))
            elif not link.is_open and since is not None and now - since > self._connect_timeout_s:
                found.append((node_rank, f"the connection was not made within {self._connect_timeout_s:g} s"))
        self._looked_at = 0.0 if found else now
        return found

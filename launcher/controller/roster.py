"""Many hosts with their states, messages to them, and their answers; with a job or without one."""

from __future__ import annotations

import queue
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from ..backends.bootstrap import USUAL, AgentParts
from ..backends.channel import Channel
from ..job.plan import NodePlan
from ..options.start import CONNECT_WINDOW
from ..output.console import Console
from ..wire.frames import Frame, Hello, Ping, Ready, Renew, Start, encode
from ..wording import cleaned
from .kept_agents import KeptAgents
from .link import Link, LinkEnd
from .pulse import MAX_PING_EVERY_S, Pulse

LOOK_EVERY_S = 0.2  # looks for silence
MAX_NAMED = 4
MAX_NOTES = 16  # notes per host; an agent of ours has a few
MAX_NOTE_LINES = 200


@dataclass(slots=True, eq=False)
class HostState:
    """The state of one host. It is `over` when its agent said so or its stream ended; `is_lost`: the job
    does not wait for its end.
    """

    plan: NodePlan
    link: Link
    ranks: frozenset[int]
    hello: Hello | None = None
    ready: Ready | None = None
    pids: dict[int, int] = field(default_factory=dict)  # by rank
    exit_codes: dict[int, int] = field(default_factory=dict)  # by rank
    clock_offset_s: float = float("inf")  # our monotonic clock minus the host's, delay of one frame included
    pinged: tuple[int, float] = (-1, 0.0)  # the number of the last ping, and the time of sending
    has_failed: bool = False
    is_started: bool = False  # its processes were asked to start
    is_over: bool = False
    is_lost: bool = False
    is_kept: bool = False  # its agent is there from an attempt before
    is_done: bool = False  # its agent said that nothing of the job is left
    is_staying: bool = False  # its agent is kept for another attempt

    @property
    def name(self) -> str:
        return self.plan.host.name

    @property
    def num_running(self) -> int:
        """Workers that started and have not ended."""
        return 0 if self.is_over else len(self.pids) - len(self.exit_codes)

    @property
    def can_stay(self) -> bool:
        """Tell whether its agent can serve another attempt of the job."""
        has_ended_well = self.is_done and self.ready is not None and self.hello is not None
        return has_ended_well and self.is_over and not self.has_failed and self.link.is_open

    def send(self, *frames: Frame) -> None:
        if not self.is_over:
            self.link.send(b"".join(map(encode, frames)))

    def start(self, frame: Start) -> None:
        """Ask it to start its processes."""
        self.is_started = True
        self.send(frame)

    def ping(self, number: int) -> None:
        """Ping the host; the answer shows that it lives, and how far the two clocks are apart. An agent that
        may stay is pinged while others end: it would be silent for too long, and be lost with its snapshots.
        """
        self.pinged = number, time.monotonic()
        if not self.is_over or self.can_stay:
            self.link.send(encode(Ping(number)))


class AgentEvent(NamedTuple):
    """A frame of a host, or LinkEnd after its last one."""

    host: HostState
    item: Frame | LinkEnd
    at_s: float


class Roster:
    """The hosts in rank order. Iterates over them; no method but `next` and `close` blocks.

    A host may be silent for `silence_s` once its agent runs. The agent has `hello_timeout_s` from the open
    connection to its first word (`enter_timeout_s` after a prefix, which may have to fetch and start a
    container), and the connection `connect_timeout_s`, if each step of it has not a shorter limit of its own.
    As a context manager it begins, and at the end no process is left on any host.
    """

    def __init__(
        self,
        nodes: Sequence[NodePlan],
        *,
        connect: Callable[[NodePlan], Channel],
        silence_s: float,
        hello_timeout_s: float,
        enter_timeout_s: float = 600.0,
        connect_timeout_s: float = float("inf"),
        window: int = CONNECT_WINDOW,
        parts: AgentParts = USUAL,
    ) -> None:
        places = threading.BoundedSemaphore(window)
        self._link_to: Callable[[NodePlan], Link] = lambda node: Link(
            node, connect=connect, window=places, parts=parts
        )
        self.hosts = tuple(
            HostState(plan=node, link=self._link_to(node), ranks=frozenset(one.rank for one in node.ranks))
            for node in nodes
        )
        self._silence_s = silence_s
        self._hello_timeout_s = hello_timeout_s
        self._enter_timeout_s = enter_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._events: queue.SimpleQueue[AgentEvent] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._pulse = Pulse(min(silence_s / 4, MAX_PING_EVERY_S))
        self._look_at = 0.0
        self._of_machine: dict[str, list[HostState]] = {}

    def __enter__(self) -> Roster:
        self.begin(lambda host: lambda item, at_s: self._events.put(AgentEvent(host, item, at_s)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(
        self,
        deliver_for: Callable[[HostState], Callable[[Frame | LinkEnd, float], None]],
        *,
        kept: KeptAgents | None = None,
    ) -> None:
        """Connect to all in the background, but to those of an attempt before whose agents are kept; and ping
        those whose agent runs, in a thread of its own: a terminal that blocks our output must not make us
        look dead.
        """
        self._deliver_for = deliver_for
        for host in self.hosts:
            deliver = deliver_for(host)
            agent = None if kept is None else kept.take(host.plan)
            if agent is None:
                host.link.start(deliver)
                continue
            host.link, host.is_kept = agent.link, True
            deliver(agent.hello, time.monotonic())  # before anything else that comes over its link
            host.link.hand_over(host.plan, deliver)
            host.send(Renew())
        threading.Thread(target=self._ping, name="ping", daemon=True).start()

    def __iter__(self) -> Iterator[HostState]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def is_over(self) -> bool:
        return all(host.is_over for host in self.hosts)

    @property
    def num_up(self) -> int:
        """Workers that started."""
        return sum(len(host.pids) for host in self.hosts)

    @property
    def num_running(self) -> int:
        return sum(host.num_running for host in self.hosts)

    def send(self, frame: Frame) -> None:
        """Send a frame to every host."""
        for host in self.hosts:
            host.send(frame)

    def show_progress(
        self, console: Console, what: str, missing: Sequence[HostState], began_at: float
    ) -> None:
        """Show for which hosts a phase is waited for."""
        num_failed = sum(host.has_failed for host in self.hosts)
        names = [host.name for host in missing]
        console.progress(what, len(self.hosts), names, began_at, num_failed=num_failed)

    def greet(self, host: HostState, hello: Hello) -> HostState | None:
        """Greet the agent. If another host is the same machine and was given some of the same devices,
        return it.
        """
        host.hello = hello
        others = self._of_machine.setdefault(hello.machine, []) if hello.machine else []
        devices = set(host.plan.devices)
        twin = next((one for one in others if not devices.isdisjoint(one.plan.devices)), None)
        others.append(host)
        return twin

    def connect_anew(self, host: HostState) -> bool:
        """Connect to a host whose kept agent has gone before it has done anything for this attempt; return
        False for any other host.
        """
        if not host.is_kept or host.ready is not None or host.is_over:
            return False
        host.link.abandon()
        if host.hello is not None:
            self._of_machine[host.hello.machine] = [
                one for one in self._of_machine.get(host.hello.machine, []) if one is not host
            ]
        host.is_kept, host.hello = False, None
        host.link = self._link_to(host.plan)
        host.link.start(self._deliver_for(host))
        return True

    def keep(self, kept: KeptAgents) -> None:
        """Keep the agents that another attempt of the job can have; `close` leaves them alone."""
        for host in self.hosts:
            if host.can_stay and host.hello is not None:
                host.is_staying = True
                kept.add(host.plan, host.link, host.hello)

    def next(self, timeout_s: float) -> AgentEvent | None:
        """Return the next frame of a host, or None.

        Must be called again and again, because this call also notices silent hosts.
        """
        now = time.monotonic()
        if now >= self._look_at:
            self.forgive_standstill()
            for host in self.hosts:
                silence = self.why_silent(host)
                if silence is not None:  # give up one host for each call; the next call sees the others
                    self.lose(host)
                    return AgentEvent(host, LinkEnd(silence[0]), now)
            self._look_at = now + LOOK_EVERY_S
        try:
            event = self._events.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if event.host.is_over:
            return None
        if isinstance(event.item, Hello):
            event.host.hello = event.item
        elif isinstance(event.item, LinkEnd):
            self.lose(event.host)
        return event

    def leave(self, host: HostState) -> None:
        """Stop listening to a host whose agent ends by itself."""
        host.is_over = True
        host.link.abandon()

    def lose(self, host: HostState) -> None:
        """Give a host up: stop listening to it, and do not wait for its end."""
        host.is_lost = True
        self.leave(host)

    def why_silent(self, host: HostState) -> tuple[str, float] | None:
        """Return why a silent host must be given up, and since when it has been silent; None if it need not
        be.
        """
        now, silent_s, connecting_at = time.monotonic(), host.link.silent_s(), host.link.connecting_at
        if host.is_over:
            return None
        if host.hello is not None and silent_s > self._silence_s:
            why = f"nothing heard for {silent_s:.0f} s; the host, its network or its agent is down"
            return why, now - silent_s
        prefix = host.plan.host.exec_prefix
        if prefix and host.hello is None and host.link.open_s() > self._enter_timeout_s:
            why = f"{shlex.join(prefix)} started no agent within {self._enter_timeout_s:g} s"
            hint = "does it wait for something? Fetch a large image first, or give more --prepare_timeout"
            return f"{why}; {hint}", now
        if not prefix and host.hello is None and host.link.open_s() > self._hello_timeout_s:
            why = f"connected, but no agent answered within {self._hello_timeout_s:g} s"
            hint = (
                "does a login script wait, or read what is meant for the agent? Are large packets lost (MTU)?"
            )
            return f"{why}; {hint}", now
        is_slow = connecting_at is not None and now - connecting_at > self._connect_timeout_s
        if is_slow and not host.link.is_open:
            return f"the connection was not made within {self._connect_timeout_s:g} s", now
        return None

    def _ping(self) -> None:
        number = 0
        while not self._is_closed.wait(self._pulse.every_s if number else 0.0):
            number += 1
            self._pulse.beat()
            for host in self.hosts:
                # Before its Hello the host must get only the agent's source, and no frame
                if host.hello is not None:
                    host.ping(number)

    def forgive_standstill(self) -> float:
        """If this process stood still, count all hosts' silence from now; return how long it did."""
        gap_s = self._pulse.take_gap_s()
        if gap_s:
            for host in self.hosts:
                host.link.forgive_silence()
        return gap_s

    def are_all_silent(self, for_s: float) -> bool:
        """Tell whether several hosts are reached over a network and all of these are silent."""
        others = [host for host in self.hosts if not host.plan.is_local and not host.is_over]
        return len(others) > 1 and all(host.hello and host.link.silent_s() > for_s for host in others)

    def close(self) -> None:
        """End all streams and wait until no process or file of them is left on this machine."""
        self._is_closed.set()
        ending = [host for host in self.hosts if not host.is_staying]
        for host in ending:
            host.link.abandon()
        for host in ending:
            if not host.is_lost:
                host.link.close()

    def running_ranks(self) -> dict[int, str]:
        """`HOST, pid N` of each rank that runs."""
        return {
            rank: f"{host.name}, pid {pid}"
            for host in self.hosts
            for rank, pid in host.pids.items()
            if not host.is_over and rank not in host.exit_codes and not host.plan.role
        }

    def ended_ranks(self) -> set[int]:
        """Ranks that ended, or whose host is not heard any more."""
        return {rank for host in self.hosts for rank in (host.pids if host.is_over else host.exit_codes)}

    def notes(self) -> list[str]:
        """Notes of the agents for the user, equal ones once with all hosts that sent them."""
        hosts_of: dict[str, list[str]] = {}
        for host in self.hosts:
            found = host.ready.notes if host.ready else []
            left_out = (
                [f"{len(found) - MAX_NOTES} more notes are not shown"] if len(found) > MAX_NOTES else []
            )
            for note in (*found[:MAX_NOTES], *left_out):
                hosts_of.setdefault(cleaned(note), []).append(host.name)
        lines = [f"{_names(hosts)}: {note}" for note, hosts in hosts_of.items()]
        more = len(lines) - MAX_NOTE_LINES
        return lines if more <= 0 else [*lines[:MAX_NOTE_LINES], f"{more} more notes of hosts are not shown"]


def _names(hosts: Sequence[str]) -> str:
    more = len(hosts) - MAX_NAMED
    return ", ".join(hosts[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")

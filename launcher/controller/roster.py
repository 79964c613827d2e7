"""All hosts of a job with what is known of each, and the way to say something to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..backends.channel import Channel
from ..job.plan import NodePlan
from ..wire.frames import Frame, Hello, Ping, Ready, encode
from .link import Link
from .pulse import Pulse

HELLO_TIMEOUT_S = 60.0  # from an open connection to the agent's first word
MAX_NAMED = 4


@dataclass(slots=True, eq=False)
class HostState:
    """What is known of one host. It is `over` when its agent said so or its stream ended."""

    plan: NodePlan
    link: Link
    ranks: frozenset[int]
    hello: Hello | None = None
    ready: Ready | None = None
    pids: dict[int, int] = field(default_factory=dict)  # by rank
    exit_codes: dict[int, int] = field(default_factory=dict)  # by rank
    clock_offset_s: float = float("inf")  # our monotonic clock minus the host's, delay of one frame included
    has_failed: bool = False
    is_over: bool = False

    @property
    def name(self) -> str:
        return self.plan.host.name

    @property
    def num_running(self) -> int:
        """Workers that started and have not ended."""
        return 0 if self.is_over else len(self.pids) - len(self.exit_codes)

    def send(self, *frames: Frame) -> None:
        if not self.is_over:
            self.link.send(b"".join(map(encode, frames)))

    def why_silent(self, heartbeat_s: float) -> tuple[str, float] | None:
        """Why it must be given up, and since when it has been so; None if all is well."""
        silent_s = self.link.silent_s()
        if self.is_over:
            return None
        if self.hello is not None and silent_s > heartbeat_s:
            why = f"nothing heard for {silent_s:.0f} s; the host, its network or its agent is down"
            return why, time.monotonic() - silent_s
        if self.hello is None and self.link.open_s() > HELLO_TIMEOUT_S:
            why = f"connected, but no agent answered within {HELLO_TIMEOUT_S:g} s"
            return f"{why}; does a login script wait, or read what is meant for the agent?", time.monotonic()
        return None


class Roster:
    """The hosts in rank order. Iterates over them; no method but `close` blocks."""

    def __init__(
        self,
        nodes: Sequence[NodePlan],
        *,
        connect: Callable[[NodePlan], Channel],
        window: int,
    ) -> None:
        places = threading.BoundedSemaphore(window)
        self.hosts = tuple(
            HostState(
                plan=node,
                link=Link(node, connect=connect, window=places),
                ranks=frozenset(one.rank for one in node.ranks),
            )
            for node in nodes
        )
        self._is_closed = threading.Event()
        self._pulse: Pulse | None = None
        self._of_machine: dict[str, list[HostState]] = {}

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
        """To every host."""
        for host in self.hosts:
            host.send(frame)

    def greet(self, host: HostState, hello: Hello) -> HostState | None:
        """Its agent runs. Returns a host that is the same machine and was given some of the same devices."""
        host.hello = hello
        others = self._of_machine.setdefault(hello.machine, []) if hello.machine else []
        devices = set(host.plan.devices)
        twin = next((one for one in others if not devices.isdisjoint(one.plan.devices)), None)
        others.append(host)
        return twin

    def ping_every(self, seconds: float) -> None:
        """From now on, in a thread of its own: a terminal that blocks our output must not make us look dead."""

        pulse = self._pulse = Pulse(seconds)

        def ping() -> None:
            number = 0
            while not self._is_closed.wait(seconds if number else 0.0):
                number += 1
                pulse.beat()
                for host in self.hosts:
                    if (
                        host.hello is not None
                    ):  # before that, nothing may come between the agent and its source
                        host.send(Ping(number))

        threading.Thread(target=ping, name="ping", daemon=True).start()

    def forgive_standstill(self) -> float:
        """If this process stood still, nobody's silence counts before now; returns for how long it did."""
        gap_s = self._pulse.take_gap_s() if self._pulse is not None else 0.0
        if gap_s:
            for host in self.hosts:
                host.link.forgive_silence()
        return gap_s

    def are_all_silent(self, for_s: float) -> bool:
        """Whether nothing is heard of any of several hosts that a network leads to."""
        others = [host for host in self.hosts if not host.plan.is_local and not host.is_over]
        return len(others) > 1 and all(host.hello and host.link.silent_s() > for_s for host in others)

    def close(self) -> None:
        """End all streams and wait until nothing of them is left on this machine."""
        self._is_closed.set()
        for host in self.hosts:
            host.link.close()

    def running_ranks(self) -> dict[int, str]:
        """`HOST, pid N` of each worker that runs."""
        return {
            rank: f"{host.name}, pid {pid}"
            for host in self.hosts
            for rank, pid in host.pids.items()
            if not host.is_over and rank not in host.exit_codes
        }

    def ended_ranks(self) -> set[int]:
        """Those that ended, or of which nothing more can be heard."""
        return {rank for host in self.hosts for rank in (host.pids if host.is_over else host.exit_codes)}

    def notes(self) -> list[str]:
        """What the agents want a person to know, each once, with the hosts it comes from."""
        hosts_of: dict[str, list[str]] = {}
        for host in self.hosts:
            for note in host.ready.notes if host.ready else ():
                hosts_of.setdefault(note, []).append(host.name)
        return [f"{_names(hosts)}: {note}" for note, hosts in hosts_of.items()]


def _names(hosts: Sequence[str]) -> str:
    more = len(hosts) - MAX_NAMED
    return ", ".join(hosts[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")

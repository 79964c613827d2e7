"""The searches of one attempt: for the address of node 0, then for that of each server's host."""

from __future__ import annotations

from collections.abc import Callable

from ..job.master_address import is_for_others, master_address
from ..job.plan import NodePlan, Plan
from ..output.console import Console
from ..wire.frames import Frame, Hello, Listening, Reached
from .master_search import MasterSearch
from .roster import HostState, Roster


class AddressSearch:
    """The search that goes on, or was the last. What it finds is `address`."""

    def __init__(self, plan: Plan, roster: Roster, console: Console) -> None:
        self._plan, self._roster, self._console = plan, roster, console
        self._search = MasterSearch(plan, self._send)

    def _send(self, node_rank: int, frame: Frame) -> None:
        self._roster.hosts[node_rank].send(frame)

    @property
    def address(self) -> str:
        return self._search.address

    def is_over(self) -> bool:
        return self._search.is_over

    def is_answered(self, host: HostState) -> bool:
        """Tell whether the host has answered in this round; there may be a second one."""
        return self._search.is_answered(host.plan.node_rank)

    def prepare(self, host: HostState) -> None:
        """Take note that the host is prepared, so that it can be asked to try."""
        self._search.prepare(host.plan.node_rank)

    def take(self, host: HostState, frame: Listening | Reached) -> None:
        """Take an answer of a host that listens, or that tried."""
        self._search.take(host.plan.node_rank, frame)

    def lose_first(self) -> None:
        """Give up node 0."""
        self._search.lose_first()

    def greet_first(self, hello: Hello) -> None:
        """Have node 0 listen. Begin now if that is possible: facts that come later do not change the address
        to try first.
        """
        self._search.listen()
        if self._plan.master.address or is_for_others(hello.reached_at):
            self.begin()

    def begin(self) -> None:
        """Begin the search for the address of node 0, unless it has begun or node 0 is not there."""
        first, *others = self._roster
        if self._search.is_begun or first.hello is None:
            return
        default = self._plan.master.address or master_address(
            is_one_machine=not self._search.is_needed,
            reached_at=first.hello.reached_at,
            hostname=first.hello.hostname,
            address_to_peers=next((one.link.local_address for one in others if one.link.local_address), ""),
        )
        self._search.begin(default, more=(first.hello.hostname, first.name))

    def begin_for(self, server: NodePlan, address: str, names: tuple[str, ...]) -> None:
        """Begin the next search: is `address` where all trainers reach the server's host?"""
        self._search = MasterSearch(self._plan, self._send, server=server)
        self._search.listen()
        for node in self._plan.nodes:
            self._search.prepare(node.node_rank)
        self._search.begin(address, more=names)

    def report(self, fail: Callable[[HostState, str], None]) -> None:
        """Report what was found; `fail` gets each host that does not reach node 0, and why."""
        for node_rank, message in self._search.failures:
            fail(self._roster.hosts[node_rank], message)
        for note in self._search.notes:
            self._console.say(note)
        for warning in self._search.warnings:
            self._console.warn(warning)

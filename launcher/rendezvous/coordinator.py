"""Node 0's meeting place in a job without SSH: waits for all nodes, lets them start together, spreads the
first failure.

One thread serves all connections and never waits for one of them. Node 0's own part is a member like the
others, over a socket pair.

[Note: The second door]
Training needs the master port; the coordinator's own port may be blocked without a sign of it. So until the
start the coordinator answers on the master port too. A node that comes in there is present, and so is not
missing, but cannot stay: rank 0 needs the port. It is told to start and left alone, and both sides report
what that loses. This tells a blocked port from a node that does not come.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from enum import Enum

from ..errors import EXIT_HOST, EXIT_MISTAKE
from ..output.console import Console
from ..wire.frames import ProtocolError
from .admission import Refusal, is_proven, refusal_of
from .connections import Connections, Peer
from .failure_log import FailureLog
from .messages import (
    PROTOCOL,
    Beat,
    Challenge,
    End,
    Failed,
    Go,
    JobIdentity,
    Join,
    Joined,
    News,
    NodeEnded,
    NodeReady,
    Proof,
    Refused,
    both,
)
from .standstill import Standstill

LINGER_S = 5.0  # a job that failed before its start still tells nodes that come within this
GOODBYE_S = 5.0  # for the others to read the last frame
STOP_MARGIN_S = 15.0  # after the workers' grace; longer than a controller allows its agent
MAX_COMPLAINTS = 5
MAX_REFUSALS = 128
TICK_S = 0.1


class CoordinatorState(Enum):
    """GATHERING nodes until all are ready; RUNNING; STOPPING after a failure; ENDED."""

    GATHERING = 1
    RUNNING = 2
    STOPPING = 3
    ENDED = 4


class Coordinator:
    """Serves one job, in a thread from `start` until every node was told the end."""

    def __init__(
        self,
        identity: JobIdentity,
        *,
        console: Console,
        heartbeat_s: float,
        kill_grace_s: float,
        timeout_s: float,
        second_port: int | None = None,
    ) -> None:
        self.failures = FailureLog()  # to be read after `join`
        self._identity = identity
        self._console = console
        self._heartbeat_s = heartbeat_s
        self._kill_grace_s = kill_grace_s
        self._timeout_s = timeout_s
        self._second_port = second_port
        self._state = CoordinatorState.GATHERING
        self._is_started = False
        self._connections = Connections(self)
        self._own: Peer | None = None  # node 0's part, over a connection that was made here
        self._members: dict[int, Peer] = {}
        self._expected = set(range(len(identity.names)))  # nodes whose end is waited for
        # When each node reported that no process of its part is left; after `join`, too.
        self.ended_at: dict[int, float] = {}
        self._refusals: dict[int, str] = {}  # by the node rank that was claimed
        self._linger_until = self._end_by = float("inf")
        self._beat_at = 0.0
        self._namesake = ""
        self._standstill = Standstill(every_s=TICK_S, heartbeat_s=heartbeat_s)
        self._num_complaints = 0
        self._began_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def listen(self, port: int) -> int:
        """Answer on this port, on all addresses; return the port. Errors: OSError if it cannot be bound."""
        return self._connections.open_door(port)

    def adopt(self, sock: socket.socket) -> None:
        """Take over a connection that was made elsewhere; before `start`."""
        self._own = self._connections.adopt(sock, where="here")

    def start(self) -> None:
        self._began_at = time.monotonic()
        self._thread.start()

    # These may be called from any thread.

    def is_gathering(self) -> bool:
        return self._state is CoordinatorState.GATHERING

    def is_ours(self, nonce: str) -> bool:
        """Tell whether this coordinator has given the nonce to a connection."""
        return nonce.startswith(self._connections.mark)

    def give_way(self, namesake: str) -> None:
        """End this part of the job, because another node is node 0; the others know nothing of it."""
        self._namesake = namesake

    def join(self, timeout_s: float) -> None:
        """Wait until all nodes were told the end."""
        self._thread.join(timeout_s)

    # The loop.

    def _run(self) -> None:
        try:
            while self._state is not CoordinatorState.ENDED:
                self._connections.serve(TICK_S)
                if self._standstill.look():
                    for peer in self._connections.peers:
                        peer.heard_at = time.monotonic()
                self._tick(time.monotonic())
            self._say_goodbye()
        finally:
            self._connections.close()

    def _tick(self, now: float) -> None:
        for peer in [*self._members.values()]:
            if now - peer.heard_at > self._heartbeat_s:
                self._connections.drop(peer)
                self.lose(peer, f"nothing heard for {now - peer.heard_at:.0f} s", at=peer.heard_at)
        self._beat(now)
        if self._state is CoordinatorState.GATHERING:
            self._look_who_is_missing(now)
        elif self._state is CoordinatorState.STOPPING:
            self._look_who_still_stops(now)
        if (
            self._state in (CoordinatorState.RUNNING, CoordinatorState.STOPPING)
            and self._expected <= self.ended_at.keys()
        ):
            self._state = CoordinatorState.ENDED

    def _beat(self, now: float) -> None:
        if now >= self._beat_at:
            heartbeats_s = [self._heartbeat_s, *(peer.heartbeat_s for peer in self._members.values())]
            self._beat_at = now + min(*heartbeats_s, 20.0) / 4
            self._connections.send_all(self._members.values(), Beat())

    def _look_who_is_missing(self, now: float) -> None:
        if self._namesake:
            self._expected &= set(self._members)
            self._fail(0, self._namesake, at=now, code=EXIT_MISTAKE)
            self._linger_until = now  # later nodes come to the other one
            return
        absent = [
            rank
            for rank in sorted(self._expected)
            if rank not in self._members or not self._members[rank].is_ready
        ]
        if not absent:
            self._go()
            return
        names = [self._identity.names[rank] for rank in absent]
        self._console.progress("ready", len(self._identity.names), names, self._began_at)
        if now - self._began_at <= self._timeout_s:
            return
        self._expected &= set(self._members)
        first, *others = absent
        how = "it was not ready" if first in self._members else "it did not come"
        nor = f", nor {', '.join(self._identity.name_of(rank) for rank in others)}" if others else ""
        refusals = [
            f"; one that called itself node {rank} was refused: {self._refusals[rank]}"
            for rank in (*absent, *sorted(self._members))
            if rank in self._refusals
        ]
        hint = "start the same command there, or wait longer with --rendezvous_timeout"
        self._fail(first, f"{how} within {self._timeout_s:g} s{nor}{''.join(refusals)}; {hint}", at=now)

    def _look_who_still_stops(self, now: float) -> None:
        if now > self._linger_until:
            self._expected &= self.ended_at.keys() | set(self._members)
        if now > self._end_by:
            for rank in sorted(self._expected - self.ended_at.keys()):
                self._fail(rank, "it did not confirm that its workers ended", at=now)
            self._expected &= self.ended_at.keys()

    def _go(self) -> None:
        self._state = CoordinatorState.RUNNING
        self._is_started = True
        self._connections.close_second_door()
        for rank, peer in sorted(self._members.items()):
            self._connections.send(peer, Go())
            if peer.is_at_second_door:
                self._members.pop(rank)
                self._expected.discard(rank)
                self._connections.leave(peer)
                self._console.warn(
                    f"{self._identity.name_of(rank)} cannot reach the coordinator: a failure there will not "
                    "stop the other nodes, nor a failure elsewhere that one"
                )

    def _say_goodbye(self) -> None:
        """Tell the end, and wait until all have read it: a node that closes before that may take it along."""
        culprit = self.failures.culprit()
        if culprit is not None:
            self._tell(*culprit)
        self._connections.send_all(self._members.values(), End())
        for peer in [*self._connections.peers]:
            if peer.node_rank is None:
                self._connections.drop(peer)
            else:
                self._connections.leave(peer)
        deadline = time.monotonic() + GOODBYE_S
        while self._connections.peers and time.monotonic() < deadline:
            self._connections.serve(TICK_S)

    # Failures.

    def _fail(self, node_rank: int, message: str, *, at: float, code: int = EXIT_HOST) -> None:
        """Note a failure of a node that the coordinator saw itself."""
        self._note(at, Failed(node_rank, -1, -1, 0, code, 0, message, 0.0))

    def _note(self, at: float, failed: Failed) -> None:
        self.failures.add(at, failed)
        if self.failures.stopped_at is not None:
            return
        now = time.monotonic()
        self._state = CoordinatorState.STOPPING
        self.failures.stopped_at = now
        self._linger_until = now if self._is_started else now + LINGER_S
        self._end_by = now + (self._kill_grace_s if self._is_started else 0.0) + STOP_MARGIN_S
        self._tell(at, failed)

    def _tell(self, at: float, failed: Failed) -> None:
        self._connections.send_all(
            self._members.values(), failed._replace(age_s=max(0.0, time.monotonic() - at))
        )

    def lose(self, peer: Peer, message: str, *, at: float | None = None) -> None:
        """Note that a connection ended by itself; `at` is when it was last known to be well."""
        rank = peer.node_rank
        if rank is None:
            self._console.debug(f"coordinator: {peer.where}: {message}")
            return
        if self._members.get(rank) is peer:
            del self._members[rank]
        if rank in self.ended_at:
            return
        if self._state is CoordinatorState.GATHERING and rank != 0:
            name = self._identity.name_of(rank)
            self._console.say(f"{name} left before the start ({message}); waiting for it to come again")
            return
        self._expected.discard(rank)
        standstill = self._standstill.why()
        if standstill:
            self._fail(0, standstill, at=self._standstill.began_at)
            return
        hint = "the node, its network or its dslaunch is down"
        self._fail(rank, f"{message}; {hint}", at=time.monotonic() if at is None else at)

    # Incoming frames.

    def hear(self, peer: Peer, news: News) -> None:
        """Take news of a connection. Errors: ProtocolError if they must not come from there."""
        if peer.node_rank is None:
            self._hear_stranger(peer, news)
        elif isinstance(news, NodeReady):
            peer.is_ready = True
            if (
                peer.node_rank == 0
                and self._second_port is not None
                and self._state is CoordinatorState.GATHERING
            ):
                with contextlib.suppress(OSError):  # without a second door, rank 0 will say why
                    self._connections.open_door(self._second_port, is_second=True)
        elif isinstance(news, Failed):
            code = news.code if 0 < news.code < 256 else 1
            at = time.monotonic() - max(0.0, news.age_s)
            news = news._replace(node_rank=peer.node_rank, code=code)
            if not self._identity.has(news):
                raise ProtocolError(f"a failure of rank {news.rank}, which does not run there")
            self._note(at, news)
        elif isinstance(news, NodeEnded):
            self.ended_at.setdefault(peer.node_rank, time.monotonic())
        elif not isinstance(news, Beat):
            raise ProtocolError(f"{type(news).__name__} from a member")

    # Admission.

    def _hear_stranger(self, peer: Peer, news: News) -> None:
        if isinstance(news, Challenge) and not peer.is_challenged:
            peer.is_challenged = True
            peer.nonce = both(peer.nonce, news.nonce)
            self._connections.send(peer, Proof(self._identity.coordinator_proof(peer.nonce)))
        elif isinstance(news, Join) and peer.is_challenged:
            is_stopping = self._state is CoordinatorState.STOPPING
            if news.node_rank == 0 and is_stopping and peer is not self._own:
                # It is the node 0 of the next attempt; it asks again, until this one is gone.
                self._connections.drop(peer)
            else:
                self._judge(peer, news)
        else:
            wanted = "Join" if peer.is_challenged else "Challenge"
            raise ProtocolError(f"{type(news).__name__} instead of {wanted}")

    def _judge(self, peer: Peer, join: Join) -> None:
        rank = join.node_rank
        seals = self._identity.seals(peer.nonce)
        is_ours = join.protocol == PROTOCOL and is_proven(join, self._identity, nonce=peer.nonce)
        if seals is not None and is_ours:
            peer.seal, peer.decoder.seal = seals.down, seals.up
        refusal = refusal_of(
            join,
            self._identity,
            nonce=peer.nonce,
            places={rank: member.where for rank, member in self._members.items()},
            is_late=self._is_started or rank in self.ended_at,
        )
        if refusal is None:
            self._take_in(peer, join)
        else:
            self._refuse(peer, rank, refusal)

    def _take_in(self, peer: Peer, join: Join) -> None:
        peer.node_rank, peer.heartbeat_s = join.node_rank, max(1.0, join.heartbeat_s)
        self._members[join.node_rank] = peer
        self._beat_at = 0.0
        self._console.debug(f"{self._identity.name_of(join.node_rank)} joined, from {peer.where}")
        self._connections.send(peer, Joined(self._heartbeat_s))
        first = self.failures.first_heard()
        if first is not None:
            self._tell(*first)

    def _refuse(self, peer: Peer, rank: int, refusal: Refusal) -> None:
        """End all nodes at a proven mismatch, for they were started by mistake; a running job is
        left alone.
        """
        self._connections.send(peer, Refused(refusal.told, EXIT_MISTAKE))
        self._connections.leave(peer)
        if not refusal.is_mismatch or not refusal.is_proven:
            self._note_refusal(peer, rank, refusal.why)
            return
        if not self._is_started and rank not in self._members:
            self._expected.discard(rank)
        if self._state is CoordinatorState.GATHERING:
            self._fail(rank, refusal.why, at=time.monotonic(), code=EXIT_MISTAKE)

    def _note_refusal(self, peer: Peer, rank: int, why: str) -> None:
        if len(self._refusals) < MAX_REFUSALS:
            self._refusals[rank] = why
        self._num_complaints += 1
        if self._num_complaints <= MAX_COMPLAINTS:
            last = "; more of that is not shown" if self._num_complaints == MAX_COMPLAINTS else ""
            self._console.warn(
                f"a node at {peer.where} that called itself node {rank} was refused: {why}{last}"
            )

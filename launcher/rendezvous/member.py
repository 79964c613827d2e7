"""One node of a job without SSH: its connection to the coordinator on node 0, on behalf of its controller.

One thread connects, reads and writes. It tries until the rendezvous timeout,
because nodes are started in any order.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from ..errors import EXIT_HOST
from ..job.verdict import Failure, HostFailure, signal_name
from ..output.console import Console
from ..wire.frames import ProtocolError
from .handshake import TurnedAway, ask_to_join
from .message_stream import ATTEMPT_S, TICK_S, NewsLine
from .messages import (
    Beat,
    End,
    Failed,
    Go,
    JobIdentity,
    News,
    NodeEnded,
    NodeReady,
    failure_of,
    news_of,
)
from .standstill import Standstill

RETRY_S = 0.2
SECOND_DOOR_AFTER_S = 5.0  # see coordinator.py, [Note: The second door]
LAST_TRY_S = 5.0  # to tell the others of a failure before node 0 was found


class LocalController(Protocol):
    """The controller of this node's part, as a member uses it. No method blocks."""

    def allow_start(self) -> None:
        """Allow the start: all nodes are ready."""

    def stop(self, failure: Failure) -> None:
        """Stop for a failure elsewhere."""

    def finish(self) -> None:
        """Take the other nodes for finished: no more events come from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """The places where the coordinator may be found."""

    address: str
    port: int
    second_port: int


class _Over(Exception):
    """The connection has ended; `failure` says why if it should not have."""

    def __init__(self, failure: Failure | None = None) -> None:
        super().__init__()
        self.failure = failure


class OtherNodes:
    """The other nodes, as one node's controller sees them: controller.py, `Peers`."""

    def __init__(
        self,
        identity: JobIdentity,
        node_rank: int,
        *,
        console: Console,
        heartbeat_s: float,
        timeout_s: float,
    ) -> None:
        self.told: Failure | None = None  # the failure of the job
        self._identity = identity
        self._node_rank = node_rank
        self._controller: LocalController  # from `start` on
        self._console = console
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._outbox: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._line = NewsLine()
        self._is_at_second_door = False
        self._beat_every_s = min(heartbeat_s, 20.0) / 4
        self._beat_at = 0.0
        self._standstill = Standstill(every_s=TICK_S, heartbeat_s=heartbeat_s)
        self._failed_at: float | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self, place: Doors | socket.socket, controller: LocalController) -> None:
        """Connect, or use a connection that was made elsewhere; in a thread of its own."""
        self._thread = threading.Thread(
            target=self._run, args=(place, controller), name="member", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Hang up, if that did not happen already."""
        self._is_closed = True
        self._line.wake()
        if self._thread is not None:
            self._thread.join(2 * ATTEMPT_S)
        self._line.close()

    # Messages of the controller.

    def part_is_ready(self) -> None:
        self._say(NodeReady())

    def part_failed(self, failure: Failure) -> None:
        self._failed_at = self._failed_at or time.monotonic()
        self._say(news_of(failure, node_rank=self._node_rank, now=time.monotonic()))

    def part_was_interrupted(self, number: int) -> None:
        host = self._identity.name_of(self._node_rank)
        message = f"dslaunch was told to stop there, by {signal_name(number)}"
        self.part_failed(
            HostFailure(host=host, message=message, at_s=time.monotonic(), exit_code=128 + number)
        )

    def part_ended(self) -> None:
        self._say(NodeEnded())

    def _say(self, news: News) -> None:
        self._outbox.put(news)
        self._line.wake()

    # The thread.

    def _run(self, place: Doors | socket.socket, controller: LocalController) -> None:
        self._controller = controller
        try:
            if isinstance(place, socket.socket):
                self._line.adopt(place)
                self._shake_hands()
            else:
                self._find(place)
            while True:
                self._serve()
        except _Over as over:
            if over.failure is not None:
                self._controller.stop(over.failure)
        except (OSError, ProtocolError) as error:
            if self.told is None:
                lost = self._node_0_lost(f"the connection to it ended ({_reason(error)})")
                self._controller.stop(self._own_standstill() or lost)
        finally:
            self._line.hang_up()
            self._controller.finish()

    def _find(self, doors: Doors) -> None:
        """Try until the coordinator is there, or the time is over."""
        began = time.monotonic()
        reasons: dict[int, Exception] = {}
        second_after_s = min(SECOND_DOOR_AFTER_S, self._timeout_s / 2)
        while not self._is_given_up():
            waited_s = time.monotonic() - began
            if waited_s > self._timeout_s:
                self._give_up(doors, reasons)
            ports = [doors.port] if waited_s < second_after_s else [doors.port, doors.second_port]
            for port in ports:
                try:
                    self._line.connect(doors.address, port)
                    self._is_at_second_door = port == doors.second_port
                    self._shake_hands()
                    return
                except (OSError, ProtocolError) as error:
                    reasons[port] = error
                    self._line.hang_up()
            if self._is_closed:  # closed during the try
                break
            self._console.progress("found", 1, [f"node 0 at {doors.address} port {doors.port}"], began)
            self._line.sleep(RETRY_S)
        raise _Over

    def _give_up(self, doors: Doors, reasons: dict[int, Exception]) -> None:
        """Give up: node 0 is not there, or runs without a coordinator, if another program answers at rank 0's
        port.
        """
        tried = ", ".join(f"port {port}: {_reason(error)}" for port, error in reasons.items())
        if isinstance(reasons.get(doors.second_port), ProtocolError):
            self._warn_alone(f"node 0 answers, but not as a coordinator ({tried})")
            self._controller.allow_start()
            raise _Over
        where = f"it was not found at {doors.address} within {self._timeout_s:g} s"
        raise _Over(self._node_0_lost(f"{where} ({tried})"))

    def _is_given_up(self) -> bool:
        last_try_at = float("inf") if self._failed_at is None else self._failed_at + LAST_TRY_S
        return self._is_closed or time.monotonic() > last_try_at

    def _shake_hands(self) -> None:
        try:
            joined = ask_to_join(self._line, self._identity, self._node_rank, heartbeat_s=self._heartbeat_s)
        except TurnedAway as refusal:
            raise _Over(self._own_failure(str(refusal), exit_code=refusal.exit_code)) from None
        if joined is None:
            raise AssertionError("a member took a coordinator for its own")
        self._beat_every_s = min(self._heartbeat_s, max(1.0, joined.heartbeat_s), 20.0) / 4
        self._console.debug("joined node 0")

    def _serve(self) -> None:
        if self._is_closed:
            raise _Over
        now = time.monotonic()
        if self._standstill.look():
            self._line.heard_at = now
        while not self._outbox.empty():
            self._line.send(self._outbox.get())
        if now >= self._beat_at:
            self._beat_at = now + self._beat_every_s
            self._line.send(Beat())
        for news in self._line.take():
            self._obey(news)
        silent_s = time.monotonic() - self._line.heard_at
        if silent_s > self._heartbeat_s:
            raise _Over(
                None
                if self.told
                else self._node_0_lost(f"nothing heard for {silent_s:.0f} s", at=self._line.heard_at)
            )

    def _obey(self, news: News) -> None:
        if isinstance(news, Go):
            self._controller.allow_start()
            if self._is_at_second_door:
                self._warn_alone("node 0 answers, but its coordinator's port does not")
                raise _Over
        elif isinstance(news, Failed):
            is_first, is_ours = self.told is None, news.node_rank == self._node_rank
            self.told = failure_of(news, self._identity, now=time.monotonic())
            if is_ours and news.rank < 0:  # lost, as node 0 sees it: we may know why
                self.told = self._own_standstill() or self.told
            if is_first and not (is_ours and self._failed_at is not None):
                self._controller.stop(self.told)
        elif isinstance(news, End):
            raise _Over
        elif not isinstance(news, Beat):
            raise ProtocolError(f"{type(news).__name__} from the coordinator")

    # Outgoing frames, and failures of our own making.

    def _warn_alone(self, why: str) -> None:
        self._console.warn(
            f"no coordinator: {why}. A failure on another node will not stop this one, nor one here the "
            "others; open the port, or choose one with --coordinator_port"
        )

    def _node_0_lost(self, message: str, *, at: float | None = None) -> HostFailure:
        hint = "the node, its network or its dslaunch is down, or a port is blocked"
        return HostFailure(
            host=self._identity.name_of(0),
            message=f"{message}; {hint}",
            at_s=time.monotonic() if at is None else at,
        )

    def _own_standstill(self) -> HostFailure | None:
        why = self._standstill.why()
        return self._own_failure(why)._replace(at_s=self._standstill.began_at) if why else None

    def _own_failure(self, message: str, *, exit_code: int = EXIT_HOST) -> HostFailure:
        return HostFailure(
            host=self._identity.name_of(self._node_rank),
            message=message,
            at_s=time.monotonic(),
            exit_code=exit_code,
        )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)

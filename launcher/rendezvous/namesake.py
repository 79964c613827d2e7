"""Another node that was started as node 0, too: looked for where the others look for node 0, at
--master_addr.

The node that answers there is node 0. The other one would wait until the time limit for nodes that never come
to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..wire.frames import ProtocolError
from .admission import IS_HERE
from .handshake import TurnedAway, ask_to_join
from .message_stream import NewsLine
from .messages import JobIdentity

LOOK_EVERY_S = 1.0


class Namesake:
    """The look of node 0 at its own --master_addr. `is_ours` knows the nonces of its own coordinator."""

    def __init__(
        self,
        identity: JobIdentity,
        *,
        address: str,
        port: int,
        heartbeat_s: float,
        is_ours: Callable[[str], bool],
    ) -> None:
        self._identity = identity
        self._address = address
        self._port = port
        self._heartbeat_s = heartbeat_s
        self._is_ours = is_ours

    def look(self) -> str | None:
        """Return the fault if another node 0 answers; empty if that is us; None if neither does.

        Waits some seconds at most.
        """
        line = NewsLine()
        try:
            line.connect(self._address, self._port)
            ask_to_join(line, self._identity, 0, heartbeat_s=self._heartbeat_s, is_ours=self._is_ours)
            return ""
        except TurnedAway as refusal:
            if not refusal.is_proven or not str(refusal).startswith(f"node 0 {IS_HERE}"):
                return None
            return (
                f"node 0 {IS_HERE}, at {self._address} port {self._port}, where --master_addr leads; every "
                "node needs its own --node_rank"
            )
        except (OSError, ProtocolError):
            return None
        finally:
            line.close()

    def watch(self, report: Callable[[str], None], *, is_wanted: Callable[[], bool]) -> None:
        """Look again and again, in a thread of its own, until one of the two answers, or the look is not
        wanted any more.
        """

        def run() -> None:
            found = None
            while found is None and is_wanted():
                time.sleep(LOOK_EVERY_S)
                found = self.look()
            if found:
                report(found)

        threading.Thread(target=run, name="namesake", daemon=True).start()

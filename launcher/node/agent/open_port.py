"""The port at which the other hosts try whether they reach this one."""

from __future__ import annotations

from ...wire.frames import Frame, Listen, Listening
from ..system.lean_stdlib import Selector
from ..system.listener import PortListener, why_not_listening
from ..system.own_addresses import own_addresses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class OpenPort:
    """Is open from the launcher's request or the choice of the job's port until the job starts or ends."""

    def __init__(self, selector: Selector, send: Callable[[Frame], None]) -> None:
        self._selector = selector
        self._send = send
        self._listener: PortListener | None = None
        self._asked: Listen | None = None  # a request for the job's port, which was not chosen then

    def open(self, asked: Listen, *, job_port: int | None) -> None:
        """Open at once, in place of the port before; if the job's port is asked for, once it is chosen."""
        if not asked.port and job_port is None:
            self._asked = asked
            return
        port = asked.port or job_port or 0
        try:
            listener = PortListener(port, asked.token)
        except OSError as error:
            self._send(Listening(port, [], why_not_listening(port, error)))
            return
        self.close()
        self._listener = listener
        self._selector.on_read(listener.fileno(), listener.accept)
        self._send(Listening(listener.port, own_addresses(), ""))

    def choose(self, job_port: int) -> None:
        """Open the job's port, now that it is chosen, if it was asked for."""
        if self._asked is not None:
            self.open(self._asked, job_port=job_port)

    def close(self) -> None:
        """Close the port if it is open."""
        if self._listener is not None:
            self._selector.forget(self._listener.fileno())
            self._listener.close()
            self._listener = None

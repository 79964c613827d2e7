"""One byte stream to one host: every back end makes such streams, and the controller uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from ..errors import EXIT_HOST, LaunchError
from ..job.plan import NodePlan


class WayLost(LaunchError):
    """A host cannot be heard because another one, on the way to it, is lost: the unheard host is not at
    fault.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=EXIT_HOST)


class Channel(Protocol):
    """A started bootstrap on a host. One thread reads; several may write."""

    @property
    def local_address(self) -> str:
        """This machine's address on the way to the host; empty if there is no network between them."""
        ...

    def read(self) -> bytes:
        """Wait for bytes; empty at the end of the stream."""
        ...

    def write(self, data: bytes) -> None:
        """Send all of `data`.

        Errors: OSError if the stream is closed.
        """
        ...

    def error_text(self) -> str:
        """Return the end of the host's output beside the stream (its stderr): why an agent did not start."""
        ...

    def exit_status(self) -> int | None:
        """Exit status of the bootstrap, after the end of the stream; None if it is not known."""
        ...

    def close(self) -> None:
        """End the stream, which ends the agent and all its workers; leave nothing on this machine."""
        ...


@runtime_checkable
class RelayedStream(Protocol):
    """The rest of a channel that leads through another host."""

    def way_silent_s(self) -> float:
        """Seconds for which the host on the way has been silent: the silence of the host behind it is not
        blamed on that host for a while.
        """
        ...


class LoginStream(Channel, Protocol):
    """A channel that was opened by a login, which may open further ones."""

    def hang_up(self) -> None:
        """End the stream only, which ends the bootstrap; the rest stays until `close`."""
        ...

    @property
    def is_connected(self) -> bool:
        """Tell whether the host could still be reached at the end of the stream, as far as known."""
        ...


class Login(Protocol):
    """Starts bootstraps on one host. It ends with the last stream on it, or with its holder."""

    def open(self, python: str, prefix: tuple[str, ...] = ()) -> LoginStream:
        """Start a bootstrap with this Python, after the words of a prefix.

        Errors: LaunchError if nothing more may be started there.
        """
        ...

    def hold(self) -> None: ...

    def release(self) -> None: ...


class Ways(NamedTuple):
    """Ways to reach hosts from here; `is_reached` is told of hosts that are reached in another way."""

    connect: Callable[[NodePlan], Channel]
    log_in: Callable[[NodePlan], Login]
    is_reached: Callable[[NodePlan], None] = lambda node: None

"""One byte stream to one host: what every back end gives and the controller uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from ..errors import EXIT_HOST, LaunchError
from ..job.plan import NodePlan


class WayLost(LaunchError):
    """The host on the way to this one is lost, so nothing more is heard of this one: it is not at fault."""

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
        """The end of what the host wrote beside the stream (its stderr): why an agent did not start."""
        ...

    def exit_status(self) -> int | None:
        """What the started bootstrap ended with, after the end of the stream;
        None where that is not known.
        """
        ...

    def close(self) -> None:
        """End the stream, which ends the agent and all its workers; then leave nothing
        behind on this machine.
        """
        ...


@runtime_checkable
class RelayedStream(Protocol):
    """What a channel that leads through another host has besides."""

    def way_silent_s(self) -> float:
        """For how long nothing came through that host: so much silence is, for a while, not this host's."""
        ...


class LoginStream(Channel, Protocol):
    """A channel that a login gave; such a login may give others."""

    def hang_up(self) -> None:
        """End the stream only, which ends what was started; the rest stays until `close`."""
        ...

    @property
    def is_connected(self) -> bool:
        """Whether the host could still be reached when the stream ended, as far as that is known."""
        ...


class Login(Protocol):
    """Starts bootstraps on one host. It ends with the last stream on it, or who holds it."""

    def open(self, python: str, prefix: tuple[str, ...] = ()) -> LoginStream:
        """Start one with this Python, behind the words of a prefix.

        Errors: LaunchError if nothing more may be started there.
        """
        ...

    def hold(self) -> None: ...

    def release(self) -> None: ...


class Ways(NamedTuple):
    """How hosts are reached from here: each once, by one of these, or in another way, which is told."""

    connect: Callable[[NodePlan], Channel]
    log_in: Callable[[NodePlan], Login]
    is_reached: Callable[[NodePlan], None] = lambda node: None

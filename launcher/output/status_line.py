"""The start on a terminal: one line that changes in place, and is gone when the workers run."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import LaunchError
from ..inputs.host_list import folded
from ..wording import count
from .writer import StreamSink

ERASE = b"\r\x1b[K"  # to the first column, and clear from there
MAX_NAMED = 4
MAX_NAMES_LENGTH = 80


def describe_hosts(phase: str, num_hosts: int, missing: Sequence[str], num_failed: int) -> str:
    """Return `3 of 8 hosts connected, 1 failed, waiting for w1, w2, w3, w4`; of more `w[1-5]`."""
    num_done = num_hosts - len(missing) - num_failed
    text = f"{num_done} of {count(num_hosts, 'host')} {phase}"
    if num_failed:
        text += f", {num_failed} failed"
    if missing:
        names = ", ".join(missing) if len(missing) <= MAX_NAMED else folded(missing)
        if len(names) > MAX_NAMES_LENGTH:
            names = f"{', '.join(missing[:MAX_NAMED])} and {len(missing) - MAX_NAMED} more"
        text += f", waiting for {names}"
    return text


class StatusLine:
    """The line of a terminal that is written over and over.

    All its methods are called by the writer's thread.
    """

    def __init__(self, terminal: StreamSink) -> None:
        self._terminal = terminal
        self._is_shown = False

    def write(self, data: bytes) -> None:
        """Write `data`, made by `shown`; empty: erase the line."""
        if data or self._is_shown:
            self._terminal.write(data or ERASE)
        self._is_shown = bool(data)

    def failure(self, error: OSError) -> LaunchError:
        return self._terminal.failure(error)


class AboveStatusLine:
    """A stream whose bytes appear on the same terminal, so the line is erased before each of them."""

    def __init__(self, stream: StreamSink, line: StatusLine) -> None:
        self._stream = stream
        self._line = line

    def write(self, data: bytes) -> None:
        self._line.write(b"")
        self._stream.write(data)

    def failure(self, error: OSError) -> LaunchError:
        return self._stream.failure(error)


def shown(text: str, num_columns: int) -> bytes:
    """Return the bytes that replace a status line by this text, cut to one line of the terminal."""
    return ERASE + text[: max(1, num_columns - 1)].encode("ascii", "replace")

"""Output of commands on many hosts: as it comes, or at the end with equal output once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..inputs.host_list import folded
from ..wire.frames import bytes_of

MAX_HELD_BYTES = 64 << 20  # limit for all hosts together; output beyond it is passed on as it comes


class Put(Protocol):
    """Takes bytes for stdout (1) or stderr (2); calls `on_done` when they are written."""

    def __call__(self, stream: int, data: bytes, on_done: Callable[[], None] | None = None) -> None: ...


class HostOutput:
    """Writes each line with its host in front.

    With folding, output that is equal on several hosts is shown once, at the end, for all of them.
    """

    def __init__(self, names: Sequence[str], put: Put, *, is_folding: bool) -> None:
        self._put = put
        self._is_folding = is_folding
        self._held: dict[str, dict[int, list[bytes]]] = {name: {1: [], 2: []} for name in names}
        self._num_held = 0
        self.was_too_much = False

    def add(self, name: str, stream: int, text: str, on_done: Callable[[], None]) -> None:
        """Take whole lines of one host; `on_done` is called when the host may send more."""
        data = bytes_of(text)
        if not self._is_folding:
            self._put(stream, _prefixed(name, data), on_done)
            return
        self._held[name][stream].append(data)
        self._num_held += len(data)
        on_done()
        if self._num_held > MAX_HELD_BYTES:
            self.was_too_much = True
            self.finish()
            self._is_folding = False

    def finish(self) -> None:
        """Show the held output: groups of hosts in order of their first one, stdout and stderr apart."""
        groups: dict[tuple[bytes, bytes], list[str]] = {}
        for name, streams in self._held.items():
            groups.setdefault((b"".join(streams[1]), b"".join(streams[2])), []).append(name)
            streams[1].clear()
            streams[2].clear()
        self._num_held = 0
        for (out, err), names in groups.items():
            for stream, data in ((1, out), (2, err)):
                if data:
                    self._put(stream, _prefixed(folded(names), data))


def _prefixed(name: str, data: bytes) -> bytes:
    """Put the name before each of the whole lines."""
    head = f"{name}: ".encode()
    return b"".join(head + line + b"\n" for line in data.removesuffix(b"\n").split(b"\n"))

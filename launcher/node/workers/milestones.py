"""Milestones of the workers' start: process group made, first collective done."""

from __future__ import annotations

import os

from ...wire.frames import Milestone

READ_BYTES = 1 << 16


class MilestonePipe:
    """A named pipe in the agent's folder.

    Each worker writes one line for each phase: rank, monotonic time, name.
    """

    def __init__(self, path: str) -> None:
        """Errors: OSError if the pipe cannot be made."""
        self.path = path
        os.mkfifo(path, 0o600)
        # Opened for writing too, so that it never comes to an end.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        self._rest = b""

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[Milestone]:
        """Return the milestones since the last call. Lines in another form are left out."""
        try:
            *lines, self._rest = (self._rest + os.read(self._fd, READ_BYTES)).split(b"\n")
        except BlockingIOError:
            return []
        found = []
        for line in lines:
            rank, _, more = line.partition(b" ")
            at, _, name = more.partition(b" ")
            try:
                found.append(Milestone(int(rank), name.decode("ascii"), float(at)))
            except ValueError:
                continue
        return found

    def close(self) -> None:
        os.close(self._fd)

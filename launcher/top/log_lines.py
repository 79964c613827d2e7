"""What a detached job has shown, as lines of text, from its journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..registry.journal_reader import Entry, JournalReader
from ..registry.known_jobs import KnownJob

MAX_LINES = 2000


class LogLines:
    """The last lines that are there, then those that come."""

    def __init__(self, job: KnownJob) -> None:
        self._reader = JournalReader(job.folder)
        self._hosts: dict[int, str] = {}

    def more(self) -> list[str]:
        """What has come since the last time, of much the last lines only."""
        found: deque[str] = deque(maxlen=MAX_LINES)
        for one in self._reader.entries():
            found.extend(self._lines(one))
        return list(found)

    def close(self) -> None:
        self._reader.close()

    def _lines(self, entry: Entry) -> Iterator[str]:
        kind = entry[0]
        if kind == "b":
            self._hosts = {worker[2]: f"{worker[0]}:{worker[3]}" for worker in entry[2]}
        elif kind == "o":
            ranks = [self._hosts.get(rank, str(rank)) for rank in entry[2]]
            for text in entry[4].splitlines():
                yield f"{', '.join(ranks)} | {text}"
        elif kind == "w":
            yield f"dslaunch: {entry[3]}"
        elif kind == "i":
            yield f"    {entry[2]}"
        elif kind == "r":
            yield from entry[2].splitlines()

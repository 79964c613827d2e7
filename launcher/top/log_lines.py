"""The output of a detached job, as lines of text, from its journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..output.display import Begun, Below, Lines, Raw, Said
from ..registry.journal import Entry, shown_of
from ..registry.journal_reader import JournalReader
from ..registry.known_jobs import KnownJob

MAX_LINES = 2000


class LogLines:
    """The last lines that are there, then those that come."""

    def __init__(self, job: KnownJob) -> None:
        self._reader = JournalReader(job.folder)
        self._hosts: dict[int, str] = {}

    def more(self) -> list[str]:
        """Return the lines since the last call, of many only the last."""
        found: deque[str] = deque(maxlen=MAX_LINES)
        for one in self._reader.entries():
            found.extend(self._lines(one))
        return list(found)

    def close(self) -> None:
        self._reader.close()

    def _lines(self, entry: Entry) -> Iterator[str]:
        shown = shown_of(entry)
        if isinstance(shown, Begun):
            self._hosts = {one.rank: f"{one.host}:{one.role or one.local_rank}" for one in shown.origins}
        elif isinstance(shown, Lines):
            ranks = [self._hosts.get(rank, str(rank)) for rank in shown.ranks]
            for text in _lines_of(shown.body):
                yield f"{', '.join(ranks)} | {text}"
        elif isinstance(shown, Said):
            yield f"dslaunch: {shown.message}"
        elif isinstance(shown, Below):
            yield f"    {shown.text}"
        elif isinstance(shown, Raw):
            yield from _lines_of(shown.body)


def _lines_of(body: bytes) -> list[str]:
    return body.decode("utf-8", "surrogateescape").splitlines()

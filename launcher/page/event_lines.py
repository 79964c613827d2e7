"""The events of a file, one by one, whatever is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..node.plain_file import open_plain
from ..run_state.event_reader import MAX_LINE_BYTES, event_of


class EventLines:
    """Reads files of events. `num_bad` lines are no events, `is_cut` says whether the last one has no end."""

    def __init__(self) -> None:
        self.num_bad = 0
        self.is_cut = False
        self.num_events = 0

    def read(self, path: Path) -> Iterator[dict[str, Any]]:
        """Each event that can be read.

        Errors: LaunchError if the file cannot be opened or read
        """
        try:
            with open(open_plain(str(path), 0), "rb") as file:
                while line := file.readline(MAX_LINE_BYTES):
                    is_whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
                    while not is_whole and line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                    event = event_of(line) if is_whole else None
                    if event is not None:
                        self.num_events += 1
                        yield event
                    elif is_whole and not line.endswith(b"\n"):
                        self.is_cut = True
                    else:
                        self.num_bad += bool(line.strip()) or not is_whole
        except OSError as error:
            raise LaunchError(f"{path}: cannot be read: {error.strerror}") from None

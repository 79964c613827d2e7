"""Shows a journal as the console of the job would have, for the terminal that reads it now."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from ..options.logs import LogOptions
from ..output.display import Begun, Lines, Raw, Said, Shown, StreamDisplay
from ..output.writer import Writer
from ..wording import count
from .journal import Entry, shown_of

WARNING = 30


class Choice(NamedTuple):
    """The shown part of a journal: output of these ranks; None: all ranks, and the messages of dslaunch."""

    ranks: tuple[range, ...] | None = None
    has_ranks: bool = True  # False: only the messages of dslaunch
    has_timestamps: bool = False


class Replay:
    """Gives the entries of a journal to this process's screens."""

    def __init__(self, choice: Choice) -> None:
        self.writer = Writer()
        self._choice = choice
        self._display = StreamDisplay(self.writer, LogOptions())
        self._segment = -1

    def show(self, entries: Iterable[Entry]) -> None:
        for one in entries:
            self._show(one)

    def say(self, message: str, *, level: int = 20) -> None:
        """Show a sentence of the command that shows the journal."""
        self._display.put(Said(time.time(), level, message))

    def _show(self, entry: Entry) -> None:
        if entry[0] == "h":
            self._begin_file(entry)
        elif entry[0] == "l":
            words = f"warning: {count(entry[1], 'line')} could not be kept here: {entry[2]}"
            self.say(words, level=WARNING)
        else:
            shown = shown_of(entry)
            if shown is not None and self._is_chosen(shown):
                self._display.put(shown)

    def _is_chosen(self, shown: Shown) -> bool:
        has_ranks, ranks = self._choice.has_ranks, self._choice.ranks
        if isinstance(shown, Lines) and has_ranks and ranks is not None:
            return any(rank in one for one in ranks for rank in shown.ranks)
        if isinstance(shown, Lines | Raw) and not has_ranks:
            return False
        return ranks is None or isinstance(shown, Begun | Lines)

    def _begin_file(self, entry: Entry) -> None:
        _, segment, dropped, template, has_timestamps = entry[:5]
        if self._segment < 0:
            has_timestamps = has_timestamps or self._choice.has_timestamps
            logs = LogOptions(prefix=template, has_timestamps=has_timestamps)
            self._display = StreamDisplay(self.writer, logs)
            if segment and dropped:
                words = f"the first {count(dropped, 'line')} are not kept any more; --log_dir keeps all"
                self.say(words, level=WARNING)
        elif segment > self._segment + 1:
            words = "lines are missing here: they came faster than they were read; --log_dir keeps all"
            self.say(words, level=WARNING)
        self._segment = segment

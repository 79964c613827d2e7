"""Shows a journal as the console of the job would have, for the terminal that reads it now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..inputs.line_prefix import Origin
from ..options.logs import LogOptions
from ..output.display import StreamDisplay
from ..output.writer import Writer
from ..wording import count
from .journal_reader import Entry

WARNING = 30


class Choice(NamedTuple):
    """What is shown of a journal: what these ranks wrote; None: all ranks, and the words of dslaunch."""

    ranks: tuple[range, ...] | None = None
    has_ranks: bool = True  # False: only the words of dslaunch
    has_timestamps: bool = False


class Replay:
    """Gives the entries of a journal to this process's screens."""

    def __init__(self, choice: Choice) -> None:
        self.writer = Writer()
        self._choice = choice
        self._display = StreamDisplay(self.writer, LogOptions())
        self._logs = LogOptions(has_timestamps=choice.has_timestamps)
        self._origins: tuple[Origin, ...] = ()
        self._segment = -1

    def show(self, entries: Iterable[Entry]) -> None:
        for one in entries:
            self._show(one)

    def say(self, message: str, *, level: int = 20) -> None:
        """A sentence of the command that shows the journal."""
        self._display.say(level, message)

    def _show(self, entry: Entry) -> None:
        kind = entry[0]
        if kind == "h":
            self._begin_file(entry)
        elif kind == "b":
            self._origins = tuple(Origin(*one) for one in entry[2])
            self._display.begin(self._origins)
        elif kind == "o":
            self._show_output(entry)
        elif self._choice.ranks is not None:
            if kind == "l":
                self._tell_lost(entry)
        elif kind == "w":
            self._display.say(entry[2], entry[3], at_s=entry[1])
        elif kind == "i":
            self._display.below(entry[2], at_s=entry[1])
        elif kind == "r" and self._choice.has_ranks:
            self._display.put(entry[1], entry[2].encode("utf-8", "surrogateescape"))
        elif kind == "p":
            self._display.status(entry[1])
        elif kind == "l":
            self._tell_lost(entry)

    def _begin_file(self, entry: Entry) -> None:
        _, segment, dropped, template, has_timestamps = entry[:5]
        if self._segment < 0:
            has_timestamps = has_timestamps or self._choice.has_timestamps
            self._logs = LogOptions(prefix=template, has_timestamps=has_timestamps)
            self._display = StreamDisplay(self.writer, self._logs)
            if segment and dropped:
                self._display.say(
                    WARNING, f"the first {count(dropped, 'line')} are not kept any more; --log_dir keeps all"
                )
        elif segment > self._segment + 1:
            self._display.say(
                WARNING, "lines are missing here: they came faster than they were read; --log_dir keeps all"
            )
        self._segment = segment

    def _show_output(self, entry: Entry) -> None:
        _, at_s, ranks, stream, text = entry[:5]
        wanted = self._choice.ranks
        if not self._choice.has_ranks or (
            wanted is not None and not any(rank in one for one in wanted for rank in ranks)
        ):
            return
        self._display.lines(tuple(ranks), stream, text.encode("utf-8", "surrogateescape"), at_s=at_s)

    def _tell_lost(self, entry: Entry) -> None:
        self._display.say(WARNING, f"warning: {count(entry[1], 'line')} could not be kept here: {entry[2]}")

"""The output of a detached job, kept in its folder as one JSON array a line.

    ["h", segment, dropped, template, timestamps]   the first line of a file: its number from 0, and how many
                                                    lines of output before it are gone
    ["l", lines, why]                               lines that could not be kept
    [letter, field, ...]                            a shown record: KINDS has the letters and the records

Two files, each of at most SEGMENT_BYTES: when `journal` is full it becomes `journal.old`.
Bytes that are no UTF-8 are surrogates, as in file names.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..inputs.line_prefix import Origin
from ..options.logs import LogOptions
from ..output.display import AllStarted, Answered, Begun, Below, Lines, Raw, Said, Shown, Status
from ..output.writer import Writer

FILE, OLD_FILE = "journal", "journal.old"
SEGMENT_BYTES = 16 << 20
KINDS: dict[str, type[Shown]] = {
    "b": Begun,
    "p": Status,
    "s": AllStarted,
    "o": Lines,
    "w": Said,
    "i": Below,
    "r": Raw,
    "a": Answered,
}
_LETTERS = {kind: letter for letter, kind in KINDS.items()}
Entry = list[Any]  # one line


class JournalFile:
    """The two files, as a sink of the writer, whose thread alone calls `write`.

    A job is not stopped because its journal cannot be written: lost lines are counted, reported to
    `on_problem`, and noted in the journal as soon as it can be written again.
    """

    def __init__(
        self,
        folder: Path,
        logs: LogOptions,
        *,
        on_problem: Callable[[str], None],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Errors: OSError if the first file cannot be made"""
        self._folder, self._logs, self._on_problem = folder, logs, on_problem
        self._segment_bytes = segment_bytes
        self._segment = 0
        self._dropped = 0  # lines in front of the older one of the two files
        self._num_lines = [0, 0]  # lines of output: in the older file, and in the present one
        self._begun = b""  # the last line that says that an attempt began: each file has it
        self._num_lost, self._why_lost = 0, ""  # lines, since the last successful write
        self._num_lost_before = 0
        self._fd = self._make()

    def write(self, data: bytes) -> None:
        num_lines = _num_output_lines(data)
        begun = data.rfind(b'["b"')
        if begun >= 0 and (begun == 0 or data[begun - 1 : begun] == b"\n"):
            self._begun = data[begun:].partition(b"\n")[0] + b"\n"
        try:
            if self._size + len(data) > self._segment_bytes and self._num_lines[1]:
                self._turn()
            if self._num_lost:
                data = line("l", self._num_lost, self._why_lost) + data
            self._append(data)
        except OSError as error:
            self._num_lost += num_lines
            self._why_lost = error.strerror or str(error)
            self._on_problem(f"output is not kept since {_clock()}: {self._why_lost}")
            return
        self._num_lines[1] += num_lines
        if self._num_lost:
            self._num_lost_before += self._num_lost
            self._num_lost = 0
            self._on_problem(f"{self._num_lost_before} lines of output were not kept: {self._why_lost}")

    def failure(self, error: OSError) -> LaunchError:
        raise AssertionError(f"a journal that cannot be written ends no job: {error}")

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            os.ftruncate(self._fd, self._size)  # no half line, so that the next ones can be read
            raise
        self._size += len(data)

    def _turn(self) -> None:
        """Begin the next file. If that fails the present one goes on."""
        new = self._make(self._segment + 1)
        os.close(self._fd)
        self._fd = new

    def _make(self, segment: int = 0) -> int:
        path = self._folder / FILE
        dropped = self._dropped + self._num_lines[0]
        head = line("h", segment, dropped + self._num_lines[1], self._logs.prefix, self._logs.has_timestamps)
        head += self._begun
        new = self._folder / f"{FILE}.new"
        fd = os.open(
            new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            os.write(fd, head)
            if segment:
                os.replace(path, self._folder / OLD_FILE)
            os.replace(new, path)
        except OSError:
            os.close(fd)
            raise
        if segment:
            self._dropped, self._num_lines = dropped, [self._num_lines[1], 0]
        self._segment, self._size = segment, len(head)
        return fd


class JournalDisplay:
    """A console's display that writes to the journal: that of a job without a terminal."""

    is_ours = False

    def __init__(self, writer: Writer, file: JournalFile, *, has_status_line: bool = False) -> None:
        """`has_status_line`: the user sees the start in a terminal."""
        self._writer, self._file = writer, file
        self.has_status_line = has_status_line
        self._status = ""

    def put(self, shown: Shown, on_done: Callable[[], None] | None = None) -> None:
        if isinstance(shown, Status):
            if shown.text == self._status:
                return
            self._status = shown.text
        elif isinstance(shown, AllStarted):
            self.has_status_line = False  # later attempts may start unwatched
        self._writer.put(self._file, line(_LETTERS[type(shown)], *map(_plain, shown)), on_done)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return round(value, 3) if isinstance(value, float) else value


def shown_of(entry: Entry) -> Shown | None:
    """Return the shown record; None for the journal's own lines."""
    kind = KINDS.get(entry[0])
    if kind is None:
        return None
    values = entry[1 : 1 + len(kind._fields)]
    if kind is Begun:
        values[-1] = tuple(Origin(*one) for one in values[-1])
    elif kind in (Lines, Raw):
        values[-1] = values[-1].encode("utf-8", "surrogateescape")
    shown = kind(*values)
    return shown._replace(ranks=tuple(shown.ranks)) if isinstance(shown, Lines) else shown


def line(*words: Any) -> bytes:
    """Return one line of the journal."""
    return json.dumps(words, separators=(",", ":")).encode("ascii") + b"\n"


def _num_output_lines(data: bytes) -> int:
    """Count lines as a reader would: the ends of lines within texts of output, as JSON writes them."""
    return data.count(b"\\n") + data.count(b'["w"') + data.count(b'["i"')


def _clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")

"""The display of a console: the screens of this process. A detached job has a journal instead."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import IO, NamedTuple, Protocol

from ..inputs.line_prefix import DEFAULT_TEMPLATE, Origin, folded_prefix, prefix
from ..options.logs import LogOptions
from ..wording import wrapped
from .status_line import AboveStatusLine, StatusLine, shown as fitted
from .writer import Sink, StreamSink, Writer, unbuffered

ERROR_LEVEL = 40
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI foregrounds that read well on dark and light
_BOLD, _RED = 1, 31
_MAX_FOLDED_HEADS = 1000  # ranks may arrive in many orders


class Begun(NamedTuple):
    """The next attempt has these workers; attempts count from 0."""

    attempt: int
    origins: tuple[Origin, ...]


class AllStarted(NamedTuple):
    """All workers run."""


class Lines(NamedTuple):
    """Whole lines, the last newline included, that these ranks wrote at this time of day."""

    at_s: float
    ranks: tuple[int, ...]
    stream: int
    body: bytes


class Said(NamedTuple):
    """A sentence of the launcher itself."""

    at_s: float
    level: int
    message: str


class Below(NamedTuple):
    """A line that stands below such a sentence."""

    at_s: float
    text: str


class Raw(NamedTuple):
    """Unchanged bytes."""

    stream: int
    body: bytes


class Answered(NamedTuple):
    """All answers to a signal are shown."""


class Status(NamedTuple):
    """The new text of the line that changes in place; empty: the line vanishes."""

    text: str


Shown = Begun | AllStarted | Lines | Said | Below | Raw | Answered | Status


class Display(Protocol):
    """Shows the output of a console."""

    @property
    def has_status_line(self) -> bool:
        """Tell whether one line can change in place."""
        ...

    @property
    def is_ours(self) -> bool:
        """Tell whether it also shows other programs' output to our stdout and stderr."""
        ...

    def put(self, shown: Shown, on_done: Callable[[], None] | None = None) -> None:
        """Show this without blocking. `on_done` is called when Lines or Raw are written."""
        ...


class StreamDisplay:
    """Our stdout and stderr: prefixes, colors, a line that changes in place on a terminal."""

    is_ours = True

    def __init__(
        self, writer: Writer, logs: LogOptions, *, out: IO[bytes] | None = None, err: IO[bytes] | None = None
    ) -> None:
        self._writer, self._logs = writer, logs
        streams = {
            1: StreamSink(out or unbuffered(sys.stdout), "stdout"),
            2: StreamSink(err or unbuffered(sys.stderr), "stderr"),
        }
        self._terminal = streams[2] if streams[2].is_terminal else None
        self._status = StatusLine(streams[2])
        self._sinks = {number: self._above_status(stream) for number, stream in streams.items()}
        self._has_color = {
            number: stream.is_terminal and "NO_COLOR" not in os.environ for number, stream in streams.items()
        }
        self._origins: dict[int, Origin] = {}
        self._heads: dict[tuple[tuple[int, ...], int], bytes] = {}  # by ranks and stream
        self._num_folded = 0

    @property
    def has_status_line(self) -> bool:
        return self._terminal is not None

    def put(self, shown: Shown, on_done: Callable[[], None] | None = None) -> None:
        if isinstance(shown, Lines):
            self._writer.put(self._sinks[shown.stream], self._with_heads(shown), on_done)
        elif isinstance(shown, Raw):
            self._writer.put(self._sinks[shown.stream], shown.body, on_done)
        elif isinstance(shown, Said):
            self._put_line(self._sentence(shown), shown.at_s)
        elif isinstance(shown, Below):
            self._put_line(shown.text, shown.at_s)
        elif isinstance(shown, Status):
            self._put_status(shown.text)
        elif isinstance(shown, Begun):
            self._origins = {one.rank: one for one in shown.origins}
            self._heads = {}

    def _with_heads(self, shown: Lines) -> bytes:
        body, key = shown.body, (shown.ranks, shown.stream)
        head = self._heads.get(key)
        if head is None:
            head = self._make_head(*key)
        if self._logs.has_timestamps:
            head = timestamp(shown.at_s) + head
        return head + body[:-1].replace(b"\n", b"\n" + head) + b"\n" if head else body

    def _sentence(self, shown: Said) -> str:
        name, message = "dslaunch:", shown.message
        if self._terminal is not None:
            taken = len(timestamp(0)) if self._logs.has_timestamps else 0
            message = wrapped(message, self._terminal.num_columns - taken, first=len(name) + 1)
        if self._has_color[2]:
            name = f"\x1b[{_RED if shown.level >= ERROR_LEVEL else _BOLD}m{name}\x1b[0m"
        return f"{name} {message}"

    def _put_line(self, text: str, at_s: float) -> None:
        line = f"{text}\n".encode("utf-8", "surrogateescape")
        self._writer.put(self._sinks[2], timestamp(at_s) + line if self._logs.has_timestamps else line)

    def _put_status(self, text: str) -> None:
        if self._terminal is None:
            return
        if not text:
            self._writer.put(self._status, b"")
        elif self._writer.is_idle:  # a stopped terminal gets no more
            self._writer.put(self._status, fitted(f"dslaunch: {text}", self._terminal.num_columns))

    def _above_status(self, stream: StreamSink) -> Sink:
        """Return the sink of a terminal, where the status line may stand in the way."""
        if self._terminal is None or not stream.is_terminal:
            return stream
        return AboveStatusLine(stream, self._status)

    def _make_head(self, ranks: tuple[int, ...], stream: int) -> bytes:
        has_color = self._has_color[stream]
        if len(ranks) == 1:
            template = DEFAULT_TEMPLATE if self._logs.prefix is None else self._logs.prefix
            color = _COLORS[ranks[0] % len(_COLORS)]
            head = _colored(prefix(template, self._origins[ranks[0]], stream), color if has_color else None)
        elif self._logs.prefix == "":
            head = b""
        else:
            origins = tuple(self._origins[rank] for rank in ranks)
            head = _colored(folded_prefix(origins), _BOLD if has_color else None)
            self._num_folded += 1
            if self._num_folded > _MAX_FOLDED_HEADS:
                self._heads, self._num_folded = {}, 0
        self._heads[ranks, stream] = head
        return head


def timestamp(at_s: float) -> bytes:
    """Return the local time to the millisecond, ISO 8601, and a space."""
    at_ms = int(at_s * 1000)
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at_ms // 1000))
    return f"{text}.{at_ms % 1000:03} ".encode()


def _colored(head: bytes, color: int | None) -> bytes:
    body = head.rstrip()
    if color is None or not body:
        return head
    return b"\x1b[%dm%b\x1b[0m%b" % (color, body, head[len(body) :])

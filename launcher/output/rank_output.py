"""From a worker's lines to what is shown and kept of them: prefixes, the choice of ranks, folding, files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from ..inputs.line_prefix import DEFAULT_TEMPLATE, Origin, folded_prefix, prefix
from ..options.logs import LogOptions
from ..wire.frames import bytes_of
from .line_folding import Folded, Folding
from .log_files import RankFiles, after
from .writer import Sink, Writer

_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI foregrounds that read well on dark and light
_BOLD = 1


class Screen(NamedTuple):
    """One of our streams: where its bytes go."""

    sink: Sink
    has_color: bool


class RankOutput:
    """Takes what the ranks write. `begin` comes before the first line; no method blocks but `finish`."""

    def __init__(self, logs: LogOptions, writer: Writer, screens: dict[int, Screen]) -> None:
        self._logs = logs
        self._writer = writer
        self._screens = screens
        self._files: RankFiles | None = None
        if logs.log_dir is not None or logs.each_rank_dir is not None:
            self._files = RankFiles(log_dir=logs.log_dir, each_rank_dir=logs.each_rank_dir)
        self._folding = Folding(self._write_folded) if logs.is_folding else None
        self._origins: dict[int, Origin] = {}
        self._heads: dict[tuple[int, int], bytes] = {}  # by rank and stream; of those that are shown
        self._folded_heads: dict[tuple[tuple[int, ...], int], bytes] = {}

    @property
    def folder(self) -> Path | None:
        return self._files.folder if self._files is not None else None

    @property
    def warning(self) -> str:
        return self._files.warning if self._files is not None else ""

    @property
    def failure(self) -> LaunchError | None:
        """Why files cannot be written any more, if that is so."""
        return self._files.failure if self._files is not None else None

    def begin(self, origins: tuple[Origin, ...]) -> None:
        """The next attempt has these workers.

        Errors: LaunchError if their files cannot be made
        """
        self.flush()
        template = DEFAULT_TEMPLATE if self._logs.prefix is None else self._logs.prefix
        self._origins = {one.rank: one for one in origins}
        self._folded_heads = {}
        self._heads = {
            (one.rank, stream): _colored(prefix(template, one, stream), self._color(stream, one.rank))
            for one in origins
            for stream in self._screens
            if self._logs.shows(one.rank)
        }
        if self._folding is not None:
            self._folding.begin(len(self._heads) // len(self._screens))
        if self._files is not None:
            self._files.begin([one.rank for one in origins])

    def put(self, rank: int, stream: int, text: str, on_done: Callable[[], None] | None = None) -> None:
        """Whole lines of one worker; `on_done` is called when they are written."""
        body = bytes_of(text)
        if not body.endswith(b"\n"):
            body += b"\n"
        head = self._heads.get((rank, stream))
        if self._files is not None:
            if head is not None and on_done is not None:
                on_done = after(2, on_done)
            self._files.put(rank, stream, body, on_done)
        if head is None:
            if self._files is None and on_done is not None:
                on_done()
        elif self._folding is not None:
            self._folding.add(rank, stream, body, on_done)
        else:
            if self._logs.has_timestamps:
                head = timestamp(time.time()) + head
            if head:
                body = head + body[:-1].replace(b"\n", b"\n" + head) + b"\n"
            self._writer.put(self._screens[stream].sink, body, on_done)

    @property
    def places(self) -> tuple[Path, ...]:
        """Where the log files of this attempt are."""
        return self._files.places if self._files is not None else ()

    def flush(self) -> None:
        """Let no line wait for others that are the same."""
        if self._folding is not None:
            self._folding.flush()

    def give_up_if_stuck(self, timeout_s: float) -> None:
        """Keep nothing more in files if nothing could be written for so long."""
        if self._files is not None:
            self._files.give_up_if_stuck(timeout_s)

    def finish(self, timeout_s: float = float("inf")) -> bool:
        """Wait until the files are written; False if that took too long."""
        return self._files is None or self._files.finish(timeout_s)

    def _write_folded(self, lines: list[Folded], on_done: Callable[[], None]) -> None:
        wall_clock = time.time() - time.monotonic()
        runs: list[tuple[int, list[bytes]]] = []  # lines of one stream, put together
        for stream, line, ranks, first_at in lines:
            if not runs or runs[-1][0] != stream:
                runs.append((stream, []))
            time_of_day = timestamp(wall_clock + first_at) if self._logs.has_timestamps else b""
            runs[-1][1].append(time_of_day + self._folded_head(ranks, stream) + line + b"\n")
        for stream, texts in runs[:-1]:
            self._writer.put(self._screens[stream].sink, b"".join(texts))
        self._writer.put(self._screens[runs[-1][0]].sink, b"".join(runs[-1][1]), on_done)

    def _folded_head(self, ranks: tuple[int, ...], stream: int) -> bytes:
        if self._logs.prefix == "":
            return b""
        if len(ranks) == 1:
            return self._heads[ranks[0], stream]
        key = (ranks, stream)
        if key not in self._folded_heads:
            if len(self._folded_heads) > 1000:  # ranks may arrive in many orders
                self._folded_heads.clear()
            origins = tuple(self._origins[rank] for rank in ranks)
            color = _BOLD if self._screens[stream].has_color else None
            self._folded_heads[key] = _colored(folded_prefix(origins), color)
        return self._folded_heads[key]

    def _color(self, stream: int, rank: int) -> int | None:
        return _COLORS[rank % len(_COLORS)] if self._screens[stream].has_color else None


def timestamp(at_s: float) -> bytes:
    """The local time to the millisecond, ISO 8601, and a space."""
    at_ms = int(at_s * 1000)
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at_ms // 1000))
    return f"{text}.{at_ms % 1000:03} ".encode()


def _colored(head: bytes, color: int | None) -> bytes:
    body = head.rstrip()
    if color is None or not body:
        return head
    return b"\x1b[%dm%b\x1b[0m%b" % (color, body, head[len(body) :])

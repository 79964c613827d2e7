"""The way of a worker's lines to the screen and to files: the choice of ranks, folding, files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import LaunchError
from ..inputs.line_prefix import Origin
from ..options.logs import LogOptions
from ..wire.frames import bytes_of
from .display import Begun, Display, Lines
from .failure_folding import FailureFolding
from .line_folding import Folded, Folding
from .log_files import RankFiles, after

STDERR = 2


class RankOutput:
    """Takes the output of the ranks. `begin` comes before the first line; no method blocks but `finish`."""

    def __init__(self, logs: LogOptions, display: Display) -> None:
        self._logs = logs
        self._display = display
        self._files: RankFiles | None = None
        if logs.log_dir is not None or logs.each_rank_dir is not None:
            self._files = RankFiles(log_dir=logs.log_dir, each_rank_dir=logs.each_rank_dir)
        self._folding = Folding(self._write_folded) if logs.is_folding else None
        self._failures = FailureFolding(self._show_failure) if logs.folds_failures else None
        self._shown: dict[int, tuple[int]] = {}  # the ranks that are shown
        self._servers: set[int] = set()
        self._num_attempts = 0

    @property
    def folder(self) -> Path | None:
        return self._files.folder if self._files is not None else None

    @property
    def warning(self) -> str:
        return self._files.warning if self._files is not None else ""

    @property
    def failure(self) -> LaunchError | None:
        """Return why files cannot be written any more, if that is so."""
        return self._files.failure if self._files is not None else None

    def begin(self, origins: tuple[Origin, ...]) -> None:
        """Begin the next attempt with these workers.

        Errors: LaunchError if their files cannot be made
        """
        if self._failures is not None:
            self._failures.begin()
        self.flush()
        self._display.put(Begun(self._num_attempts, origins))
        self._num_attempts += 1
        self._shown = {
            one.rank: (one.rank,)
            for one in origins
            if (self._logs.shows_servers if one.role else self._logs.shows(one.rank))
        }
        self._servers = {one.rank for one in origins if one.role}
        if self._folding is not None:
            self._folding.begin(len(self._shown.keys() - self._servers))
        if self._files is not None:
            self._files.begin(
                [one.rank for one in origins if not one.role],
                servers={one.rank: _file_name(one, origins) for one in origins if one.role},
            )

    def put(self, rank: int, stream: int, text: str, on_done: Callable[[], None] | None = None) -> None:
        """Take whole lines of one worker; `on_done` is called when they are written."""
        body = bytes_of(text)
        if not body.endswith(b"\n"):
            body += b"\n"
        ranks = self._shown.get(rank)
        if self._files is not None:
            if ranks is not None and on_done is not None:
                on_done = after(2, on_done)
            self._files.put(rank, stream, body, on_done)
        if ranks is None:
            if self._files is None and on_done is not None:
                on_done()
        elif stream == STDERR and self._failures is not None and self._failures.put(rank, body):
            if on_done is not None:
                on_done()
        else:
            self._show(ranks, stream, body, on_done)

    @property
    def places(self) -> tuple[Path, ...]:
        """Return the folders of this attempt's log files."""
        return self._files.places if self._files is not None else ()

    def failed(self) -> None:
        """Note that a rank or host has failed: later messages about lost connections follow from it."""
        if self._failures is not None:
            self._failures.failed()

    def look(self, *, is_end: bool = False) -> None:
        """Show output that waited for a failure long enough; at the end all."""
        if self._failures is not None:
            self._failures.look(is_end=is_end)

    def has_shown(self, rank: int, traceback: Sequence[str]) -> bool:
        """Tell whether this traceback of a rank was shown as written, and need not be shown again."""
        return self._failures is not None and self._failures.has_shown(rank, traceback)

    def has_said(self, last_lines: Sequence[str]) -> bool:
        """Tell whether the last line is one of the runtime's that was shown, from any rank."""
        return self._failures is not None and bool(last_lines) and self._failures.has_said(last_lines[-1])

    def flush(self) -> None:
        """Show now the lines that wait for equal ones."""
        if self._folding is not None:
            self._folding.flush()

    def give_up_if_stuck(self, timeout_s: float) -> None:
        """Stop writing files if nothing could be written for `timeout_s`."""
        if self._files is not None:
            self._files.give_up_if_stuck(timeout_s)

    def finish(self, timeout_s: float = float("inf")) -> bool:
        """Wait until the files are written; False if that took too long."""
        return self._files is None or self._files.finish(timeout_s)

    def _show_failure(self, rank: int, body: bytes) -> None:
        self._show(self._shown[rank], STDERR, body, None)

    def _show(
        self, ranks: tuple[int, ...], stream: int, body: bytes, on_done: Callable[[], None] | None
    ) -> None:
        if self._folding is not None and ranks[0] not in self._servers:
            self._folding.add(ranks[0], stream, body, on_done)
        else:
            self._display.put(Lines(time.time(), ranks, stream, body), on_done)

    def _write_folded(self, lines: list[Folded], on_done: Callable[[], None]) -> None:
        wall_clock = time.time() - time.monotonic()
        for place, (stream, line, ranks, first_at) in enumerate(lines, start=1):
            done = on_done if place == len(lines) else None
            self._display.put(Lines(wall_clock + first_at, ranks, stream, line + b"\n"), done)


def _file_name(one: Origin, origins: Sequence[Origin]) -> str:
    """Return the beginning of the names of a server's files: its role, and its host if there are several."""
    is_alone = sum(other.role == one.role for other in origins) == 1
    return one.role if is_alone else f"{one.role}-{one.host}"

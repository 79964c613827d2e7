"""What a person sees: workers' lines with their origin, the launcher's own words, progress, the final report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import IO

from .errors import LaunchError
from .frames import bytes_of
from .verdict import RankFailure, Verdict
from .writer import Writer, unbuffered

PROGRESS_AFTER_S = 2.0
PROGRESS_EVERY_S = 2.0
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI foregrounds that read well on dark and light
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class Console:
    """Writes to stdout and stderr. Workers' stdout goes to stdout; everything else goes to stderr."""

    def __init__(self, *, log_level: str, out: IO[bytes] | None = None, err: IO[bytes] | None = None) -> None:
        self._level = _LEVELS[log_level]
        streams = {1: out or unbuffered(sys.stdout), 2: err or unbuffered(sys.stderr)}
        self._writer = Writer(streams[1], streams[2])
        self._has_color = {
            number: stream.isatty() and "NO_COLOR" not in os.environ for number, stream in streams.items()
        }
        self._last_progress_at = 0.0

    @property
    def failure(self) -> LaunchError | None:
        """Why stdout or stderr cannot be written to any more, if that is so."""
        return self._writer.failure

    def drain(self, timeout_s: float = float("inf")) -> bool:
        """Wait until everything is written; False if nobody read it for so long."""
        return self._writer.drain(timeout_s)

    def output(
        self, host: str, rank: int, stream: int, text: str, on_done: Callable[[], None] | None = None
    ) -> None:
        """Whole lines of one worker, each behind `host:rank`; `on_done` is called when they are written."""
        prefix = f"{host}:{rank} | "
        if self._has_color[stream]:
            prefix = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{host}:{rank} |\x1b[0m "
        head = prefix.encode()
        body = bytes_of(text)
        lines = body.removesuffix(b"\n").split(b"\n")
        self._writer.put(stream, b"".join(head + line + b"\n" for line in lines), on_done)

    def debug(self, message: str) -> None:
        self._log(10, message)

    def say(self, message: str) -> None:
        self._log(20, message)

    def warn(self, message: str) -> None:
        self._log(30, f"warning: {message}")

    def error(self, message: str) -> None:
        self._log(40, message)

    def progress(self, phase: str, num_hosts: int, missing: list[str], began_at: float) -> None:
        """Every two seconds of waiting: how far it is and who is missing."""
        now = time.monotonic()
        if now - began_at < PROGRESS_AFTER_S or now - self._last_progress_at < PROGRESS_EVERY_S:
            return
        self._last_progress_at = now
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        done = num_hosts - len(missing)
        self.say(f"{done} of {num_hosts} hosts {phase}, waiting for {shown} ({now - began_at:.0f} s)")

    def report(self, verdict: Verdict) -> None:
        """The last word: nothing after success, else who failed first, its last lines, and who else failed."""
        failed = [one for one in (verdict.culprit, *verdict.others) if one is not None]
        if not failed:
            return
        if not any(isinstance(one, RankFailure) for one in failed):
            for one in failed:
                self.error(one.describe())
            return
        culprit = failed[0]
        self.error(f"{culprit.describe()}; it failed first")
        if isinstance(culprit, RankFailure) and culprit.last_lines:
            self.error(f"last lines of rank {culprit.rank}:")
            for line in culprit.last_lines:
                self._writer.put(2, b"    " + bytes_of(line) + b"\n")
        for one in failed[1:6]:
            self.error(f"also failed: {one.describe()}")
        if len(failed) > 6:
            self.error(f"also failed: {len(failed) - 6} more")

    def _log(self, level: int, message: str) -> None:
        if level < self._level:
            return
        name = "dslaunch:"
        if self._has_color[2]:
            name = f"\x1b[{31 if level >= 40 else 1}m{name}\x1b[0m"
        self._writer.put(2, f"{name} {message}\n".encode("utf-8", "surrogateescape"))

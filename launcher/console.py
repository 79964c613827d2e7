"""What a person sees: workers' lines with their origin, the launcher's own words, progress, the final report."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import time
from typing import IO, TextIO

from .errors import LaunchError
from .frames import bytes_of
from .verdict import HostFailure, RankFailure, Verdict

PROGRESS_AFTER_S = 2.0
PROGRESS_EVERY_S = 2.0
EXIT_NOT_READ = 141  # as of a program that SIGPIPE ended
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # ANSI foregrounds that read well on dark and light
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class Console:
    """Writes to stdout and stderr. Workers' stdout goes to stdout; everything else goes to stderr."""

    def __init__(self, *, log_level: str, out: IO[bytes] | None = None, err: IO[bytes] | None = None) -> None:
        self._level = _LEVELS[log_level]
        self._streams = {1: out or _bytes_of_stream(sys.stdout), 2: err or _bytes_of_stream(sys.stderr)}
        self._has_color = {
            number: stream.isatty() and "NO_COLOR" not in os.environ
            for number, stream in self._streams.items()
        }
        self._last_progress_at = 0.0

    def output(self, host: str, rank: int, stream: int, text: str) -> None:
        """Whole lines of one worker, each behind `host:rank`."""
        prefix = f"{host}:{rank} | "
        if self._has_color[stream]:
            prefix = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{host}:{rank} |\x1b[0m "
        head = prefix.encode()
        body = bytes_of(text)
        lines = body.removesuffix(b"\n").split(b"\n")
        self._write(stream, b"".join(head + line + b"\n" for line in lines))

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
        if all(isinstance(one, HostFailure) for one in failed):
            for one in failed:
                self.error(one.describe())
            return
        culprit = failed[0]
        self.error(f"{culprit.describe()}; it failed first")
        if isinstance(culprit, RankFailure) and culprit.last_lines:
            self.error(f"last lines of rank {culprit.rank}:")
            for line in culprit.last_lines:
                self._write(2, b"    " + bytes_of(line) + b"\n")
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
        self._write(2, f"{name} {message}\n".encode("utf-8", "surrogateescape"))

    def _write(self, number: int, data: bytes) -> None:
        """All of `data`, however slow the reader is.

        Errors: LaunchError if the reader went away or the stream cannot be written to; the stream is then mute.
        """
        stream = self._streams[number]
        try:
            while True:
                try:
                    stream.write(data)
                    data = b""
                    stream.flush()
                    return
                except BlockingIOError as error:  # somebody set the open file that we share with them so
                    data = data[error.characters_written :]
                    select.select([], [stream], [])
        except OSError as error:
            name = "stdout" if number == 1 else "stderr"
            _mute(stream)
            if isinstance(error, BrokenPipeError):
                raise LaunchError(
                    f"nobody reads {name} any more, so the job was stopped", exit_code=EXIT_NOT_READ
                ) from None
            raise LaunchError(
                f"cannot write to {name}: {error.strerror}, so the job was stopped; "
                "send it to a file or a terminal that takes it"
            ) from None


def _mute(stream: IO[bytes]) -> None:
    """Let what the stream still holds vanish, or the interpreter would try again to write it when it ends."""
    with contextlib.suppress(io.UnsupportedOperation):
        number = stream.fileno()
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), number)


def _bytes_of_stream(stream: TextIO | None) -> IO[bytes]:
    """The stream below; for one that was closed before we started (`>&-`), a place where bytes vanish."""
    return open(os.devnull, "wb") if stream is None else stream.buffer

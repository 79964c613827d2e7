"""What a person sees: workers' lines with their origin, the launcher's own words,
progress, the final report.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from ..errors import LaunchError
from ..inputs.line_prefix import Origin
from ..job.verdict import Failure, RankFailure, Verdict, describe_all
from ..options.logs import LogOptions
from ..wording import cleaned, count, shown_time, wrapped
from .rank_output import RankOutput, Screen, timestamp
from .status_line import AboveStatusLine, StatusLine, describe_hosts, shown
from .writer import Sink, StreamSink, Writer, unbuffered

PROGRESS_AFTER_S = 2.0
PROGRESS_EVERY_S = 2.0
PROGRESS_GROWTH = 0.25  # of the time waited so far: a wait of five minutes makes about twenty lines, not 150
LIVE_AFTER_S = 0.3  # on a terminal; a start that is faster shows nothing
LIVE_EVERY_S = 0.1
LAST_WORDS_S = 2.0  # after an interrupt, for a reader that may not read
LAST_FILES_S = 10.0  # after an interrupt, for a disk that may be slow
URGENT_S = 0.5
MAX_OTHERS = 5  # lines on what else failed
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class Console:
    """Writes to stdout and stderr. Workers' stdout goes to stdout; everything else goes to stderr."""

    def __init__(
        self,
        *,
        log_level: str,
        logs: LogOptions | None = None,
        out: IO[bytes] | None = None,
        err: IO[bytes] | None = None,
    ) -> None:
        self.has_begun = False
        self._level = _LEVELS[log_level]
        self._logs = logs or LogOptions()
        streams = {
            1: StreamSink(out or unbuffered(sys.stdout), "stdout"),
            2: StreamSink(err or unbuffered(sys.stderr), "stderr"),
        }
        self._terminal = streams[2] if streams[2].is_terminal else None
        self._status = StatusLine(streams[2])
        self._screens = {
            number: Screen(
                sink=self._above_status(stream),
                has_color=stream.is_terminal and "NO_COLOR" not in os.environ,
            )
            for number, stream in streams.items()
        }
        self._writer = Writer()
        self._ranks = RankOutput(self._logs, self._writer, self._screens)
        self._last_progress_at = 0.0
        self._num_workers = 0

    @property
    def failure(self) -> LaunchError | None:
        """Why stdout, stderr or a log file cannot be written to any more, if that is so."""
        return self._writer.failure or self._ranks.failure

    @property
    def log_folder(self) -> Path | None:
        """Where --log_dir keeps this run, once the first attempt has begun."""
        return self._ranks.folder

    def begin(self, origins: tuple[Origin, ...]) -> None:
        """An attempt starts, with these workers.

        Errors: LaunchError if their log files cannot be made
        """
        self.has_begun = True
        self._ranks.begin(origins)
        self._num_workers = len(origins)
        if self._ranks.warning:
            self.warn(self._ranks.warning)

    def give_up_if_stuck(self, *, is_urgent: bool) -> None:
        """After an interrupt: a reader or a disk that takes nothing any more must not hold up
        the end of the job.

        Urgent means after a second one.
        """
        if self._writer.stuck_s > (URGENT_S if is_urgent else LAST_WORDS_S):
            self._writer.give_up()
        self._ranks.give_up_if_stuck(URGENT_S if is_urgent else LAST_FILES_S)

    def finish(self, *, is_patient: bool) -> None:
        """Write what is left. If not patient, give up after a while: after an interrupt the
        reader may be gone.
        """
        self._ranks.flush()
        if not self._ranks.finish(LAST_WORDS_S):
            self.say("writing what is left of the log files; Ctrl-C gives that up")
            self._ranks.finish(float("inf") if is_patient else LAST_FILES_S)
        self._writer.drain(float("inf") if is_patient else LAST_WORDS_S)

    def drain(self, timeout_s: float = float("inf")) -> bool:
        """Wait until everything is shown; False if it was not read for so long."""
        self._ranks.flush()
        return self._writer.drain(timeout_s)

    def output(self, rank: int, stream: int, text: str, on_done: Callable[[], None] | None = None) -> None:
        """Whole lines of one worker; `on_done` is called when they are written."""
        self._ranks.put(rank, stream, text, on_done)

    def put(self, stream: int, data: bytes, on_done: Callable[[], None] | None = None) -> None:
        """Bytes for stdout (1) or stderr (2) as they are; `on_done` is called when they are written."""
        self._writer.put(self._screens[stream].sink, data, on_done)

    def debug(self, message: str) -> None:
        self._log(10, message)

    def say(self, message: str) -> None:
        self._log(20, message)

    def warn(self, message: str) -> None:
        self._log(30, f"warning: {message}")

    def error(self, message: str) -> None:
        self._log(40, message)

    def progress(
        self, phase: str, num_hosts: int, missing: Sequence[str], began_at: float, *, num_failed: int = 0
    ) -> None:
        """How far the start is: on a terminal one line that changes in place,
        else lines that become rarer.
        """
        self._progress(describe_hosts(phase, num_hosts, missing, num_failed), began_at)

    def progress_of_workers(self, num_up: int, num_workers: int, began_at: float) -> None:
        """The same, when all hosts are there."""
        self._progress(f"{num_up} of {num_workers} workers up", began_at)

    def end_progress(self) -> None:
        """The start is over; its line vanishes."""
        if self._terminal is not None:
            self._writer.put(self._status, b"")

    def _progress(self, text: str, began_at: float) -> None:
        now = time.monotonic()
        waited_s = self._last_progress_at - began_at
        after_s, every_s = PROGRESS_AFTER_S, max(PROGRESS_EVERY_S, PROGRESS_GROWTH * waited_s)
        if self._terminal is not None:
            after_s, every_s = LIVE_AFTER_S, LIVE_EVERY_S
        if now - began_at < after_s or now - self._last_progress_at < every_s:
            return
        self._last_progress_at = now
        text += f" ({now - began_at:.0f} s)"
        if self._terminal is None:
            self.say(text)
        elif self._level <= _LEVELS["info"] and self._writer.is_idle:  # a stopped terminal gets no more
            self._writer.put(self._status, shown(f"dslaunch: {text}", self._terminal.num_columns))

    def report(self, verdict: Verdict, *, took_s: float) -> None:
        """The last word: that all ended well, or who failed first, its last lines, and who else failed;
        and the log files.
        """
        failed = [one for one in (verdict.culprit, *verdict.others) if one is not None]
        if failed:
            self._report_failures(failed, likely_cause=verdict.likely_cause)
            if verdict.correction:
                self.error(verdict.correction)
        elif verdict.exit_code == 0:
            what = count(self._num_workers, "worker") if self._num_workers else "the job"
            self.say(f"{what} ended with code 0 after {shown_time(took_s)}")
        for place in self._ranks.places:
            (self.error if failed else self.say)(f"log files: {place}")

    def _report_failures(self, failed: Sequence[Failure], *, likely_cause: str) -> None:
        if not any(isinstance(one, RankFailure) for one in failed):
            for line in describe_all(failed):
                self.error(line)
            return
        culprit = failed[0]
        if likely_cause:
            self.error(likely_cause)
        self.error(f"{culprit.describe()}{'' if likely_cause else '; it failed first'}")
        if isinstance(culprit, RankFailure):
            self._explain(culprit)
        others = describe_all(failed[1:])
        for line in others[:MAX_OTHERS]:
            self.error(f"also failed: {line}")
        if len(others) > MAX_OTHERS:
            self.error(f"also failed: {len(others) - MAX_OTHERS} more")

    def show(self, title: str, lines: Sequence[str]) -> None:
        """Something that was asked for, whatever the log level but critical: a sentence,
        and lines below it.
        """
        self.error(title)
        for line in lines:
            self._say_bytes(f"    {cleaned(line.expandtabs())}\n".encode("utf-8", "surrogateescape"))

    def _explain(self, culprit: RankFailure) -> None:
        for sentence in culprit.evidence:
            self.error(f"evidence: {sentence}")
        if culprit.message and not any(culprit.message in line for line in culprit.traceback):
            self.error(f"it reported: {culprit.message}")
        lines, title = culprit.traceback, "traceback"
        if not lines:
            lines, title = culprit.last_lines, "last lines"
            if culprit.last_lines_of != "stderr":
                title = f"last lines ({culprit.last_lines_of})"
        if lines:
            self.show(f"{title} of rank {culprit.rank}:", lines)

    def _log(self, level: int, message: str) -> None:
        if level >= _LEVELS["info"]:
            self._ranks.flush()  # what the ranks wrote before this
        if level < self._level:
            return
        name, message = "dslaunch:", cleaned(message)
        if self._terminal is not None:
            taken = len(timestamp(0)) if self._logs.has_timestamps else 0
            message = wrapped(message, self._terminal.num_columns - taken, first=len(name) + 1)
        if self._screens[2].has_color:
            name = f"\x1b[{31 if level >= 40 else 1}m{name}\x1b[0m"
        self._say_bytes(f"{name} {message}\n".encode("utf-8", "surrogateescape"))

    def _say_bytes(self, line: bytes) -> None:
        if self._logs.has_timestamps:
            line = timestamp(time.time()) + line
        self._writer.put(self._screens[2].sink, line)

    def _above_status(self, stream: StreamSink) -> Sink:
        """On a terminal, where the status line may stand in the way."""
        if self._terminal is None or not stream.is_terminal:
            return stream
        return AboveStatusLine(stream, self._status)

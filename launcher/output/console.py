"""The user's output: workers' lines with their origin, the launcher's messages, progress, final report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from ..errors import LaunchError
from ..inputs.line_prefix import Origin
from ..job.verdict import Failure, RankFailure, Verdict, describe_all
from ..node.observe.evidence import last_error
from ..options.logs import LogOptions
from ..run_state.run_state import RunState
from ..telemetry.summary import progress
from ..telemetry.telemetry import Telemetry
from ..wording import cleaned, count, shown_time
from .display import AllStarted, Answered, Below, Display, Raw, Said, Status, StreamDisplay
from .event_files import keep_events
from .job_watch import JobWatch
from .rank_output import RankOutput
from .status_line import describe_hosts
from .writer import Writer

PROGRESS_AFTER_S = 2.0
PROGRESS_EVERY_S = 2.0
# the next line comes after this part of the time waited so far: a wait of five minutes makes about twenty
# lines, not 150
PROGRESS_GROWTH = 0.25
LIVE_AFTER_S = 0.3  # on a terminal, a start that is faster than this shows no progress
LIVE_EVERY_S = 0.1
LAST_WORDS_S = 2.0  # wait after an interrupt for a reader that may not read
LAST_FILES_S = 10.0  # wait after an interrupt for a disk that may be slow
URGENT_S = 0.5
MAX_OTHERS = 5  # the most lines on further failures
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
        display: Callable[[Writer], Display] | None = None,
        watch: JobWatch | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        """`display` makes a display in place of stdout and stderr; `watch` follows the job's progress."""
        self.has_begun = False
        self.telemetry = telemetry or Telemetry()
        self.telemetry.on_problem = self.warn
        self._level = _LEVELS[log_level]
        self._writer = Writer()
        logs = logs or LogOptions()
        self._display: Display = (
            StreamDisplay(self._writer, logs, out=out, err=err) if display is None else display(self._writer)
        )
        self._watch = watch
        self._ranks = RankOutput(logs, self._display)
        self._last_progress_at = 0.0
        self._num_workers = 0

    @property
    def failure(self) -> LaunchError | None:
        """Return why stdout, stderr or a log file cannot be written to any more, if that is so."""
        return self._writer.failure or self._ranks.failure

    @property
    def has_streams(self) -> bool:
        """Tell whether other programs can write to our stdout and stderr, too, beside the console."""
        return self._display.is_ours

    @property
    def log_folder(self) -> Path | None:
        """Return the folder of this run in --log_dir, once the first attempt has begun."""
        return self._ranks.folder

    def begin(self, origins: tuple[Origin, ...]) -> None:
        """Begin an attempt with these workers.

        Errors: LaunchError if their log files cannot be made
        """
        self.has_begun = True
        is_first = self._ranks.folder is None
        self._ranks.begin(origins)
        self._num_workers = sum(not one.role for one in origins)
        self.register(origins)
        if is_first and self._ranks.folder is not None:
            keep_events(self.telemetry, self._ranks.folder, on_problem=self.warn)
        if self._ranks.warning:
            self.warn(self._ranks.warning)

    def register(self, origins: tuple[Origin, ...]) -> None:
        """Announce to the watch that the processes of the job are about to be started."""
        self.telemetry.begin_attempt(origins, log_folder=self._ranks.folder)
        if self._watch is not None:
            self._watch.began(
                origins, log_folder=self._ranks.folder, warn=self.warn, telemetry=self.telemetry
            )

    def started(self) -> None:
        """Note that all workers run."""
        self._display.put(AllStarted())
        self.telemetry.record_of_attempt("running")
        if self._watch is not None:
            self._watch.started()

    def stopping(self) -> None:
        """Note that the workers are told to end."""
        self.failed()
        if self._watch is not None:
            self._watch.stopping()

    def failed(self) -> None:
        """Note that a rank or a host has failed."""
        self._ranks.failed()

    def look(self) -> None:
        """Show output of ranks that has waited long enough."""
        self._ranks.look()

    def abandoned(self, exit_code: int) -> None:
        """Note that this process ends now, in the middle of its work, and does not stop the job on the
        hosts.
        """
        if self._watch is not None:
            self._watch.abandoned(exit_code)

    def give_up_if_stuck(self, *, is_urgent: bool) -> None:
        """Give up a reader or a disk that takes no more bytes: after an interrupt it must not hold up the end
        of the job.

        Urgent means after a second interrupt.
        """
        if self._writer.stuck_s > (URGENT_S if is_urgent else LAST_WORDS_S):
            self._writer.give_up()
        self._ranks.give_up_if_stuck(URGENT_S if is_urgent else LAST_FILES_S)

    def finish(self, *, is_patient: bool) -> None:
        """Write the remaining output. Unless `is_patient`, give up after a while: after an interrupt the
        reader may be gone.
        """
        self._ranks.flush()
        if not self._ranks.finish(LAST_WORDS_S):
            self.say("writing what is left of the log files; Ctrl-C gives that up")
            self._ranks.finish(float("inf") if is_patient else LAST_FILES_S)
        self._writer.drain(float("inf") if is_patient else LAST_WORDS_S)

    def drain(self, timeout_s: float = float("inf")) -> bool:
        """Wait until everything is shown; False if that took longer than `timeout_s`."""
        self._ranks.flush()
        return self._writer.drain(timeout_s)

    def output(self, rank: int, stream: int, text: str, on_done: Callable[[], None] | None = None) -> None:
        """Take whole lines of one worker; `on_done` is called when they are written."""
        self._ranks.put(rank, stream, text, on_done)
        self.telemetry.heard_output(rank, text.count("\n"))

    def put(self, stream: int, data: bytes, on_done: Callable[[], None] | None = None) -> None:
        """Write bytes to stdout (1) or stderr (2) unchanged; `on_done` is called when they are written."""
        self._display.put(Raw(stream, data), on_done)

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
        """Show the progress of the start: on a terminal one changing line, else ever rarer lines."""
        self.progress_of(describe_hosts(phase, num_hosts, missing, num_failed), began_at)

    def progress_of_workers(self, num_up: int, num_workers: int, began_at: float) -> None:
        """Show the progress of the workers' start, once all hosts are prepared."""
        self.progress_of(f"{num_up} of {num_workers} workers up", began_at)

    def end_progress(self, *, is_up: bool = False, is_stopping: bool = False) -> None:
        """End the line that shows the start: all workers run, or they were told to end."""
        self._display.put(Status(""))
        if is_up:
            self.started()
        if is_stopping:
            self.stopping()

    def progress_of(self, text: str, began_at: float) -> None:
        """Show the progress of another long task; frequent calls cost nothing."""
        now = time.monotonic()
        waited_s = self._last_progress_at - began_at
        after_s, every_s = PROGRESS_AFTER_S, max(PROGRESS_EVERY_S, PROGRESS_GROWTH * waited_s)
        if self._display.has_status_line:
            after_s, every_s = LIVE_AFTER_S, LIVE_EVERY_S
        if now - began_at < after_s or now - self._last_progress_at < every_s:
            return
        self._last_progress_at = now
        text += f" ({now - began_at:.0f} s)"
        if not self._display.has_status_line:
            self._log(20, text, is_event=False)
        elif self._level <= _LEVELS["info"]:
            self._display.put(Status(text))

    def report(self, verdict: Verdict, *, took_s: float, written: str = "") -> None:
        """Write the last message: in one line that all ranks ended well, how far they came and where the
        files are; or the first failure, its last lines, the other failures, and the log files.

        `written`: where the report will be.
        """
        failed = [one for one in (verdict.culprit, *verdict.others) if one is not None]
        self._ranks.look(is_end=True)
        if failed:
            self._say_failures(failed, likely_cause=verdict.likely_cause)
            if verdict.correction:
                self.error(verdict.correction)
        elif verdict.exit_code == 0:
            self.telemetry.flush()
            self.say(self._describe_success(took_s, written))
        if self._watch is not None:
            self._watch.reported(verdict.text if failed else "")
        if failed or verdict.exit_code:
            for place in self._ranks.places:
                (self.error if failed else self.say)(f"log files: {place}")

    def _describe_success(self, took_s: float, written: str) -> str:
        what = count(self._num_workers, "worker") if self._num_workers else "the job"
        state = self.telemetry.state
        num_hosts = len({one.host for one in state.ranks.values()})
        where = f" on {num_hosts} hosts" if num_hosts > 1 and self._num_workers else ""
        words = [
            f"{what} ended with code 0 after {shown_time(took_s)}{where}",
            _servers(state),
            progress(state),
        ]
        words += [f"log files: {place}" for place in self._ranks.places]
        words.append(f"report: {written}" if written else "")
        return "; ".join(filter(None, words))

    def _say_failures(self, failed: Sequence[Failure], *, likely_cause: str) -> None:
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
        """Show an answer, at every log level but critical: a sentence, and lines below it."""
        self.error(title)
        for line in lines:
            self._display.put(Below(time.time(), f"    {cleaned(line.expandtabs())}"))

    def answered(self) -> None:
        """Note that all answers to a signal are shown."""
        self._display.put(Answered())

    def _explain(self, culprit: RankFailure) -> None:
        for sentence in culprit.evidence:
            self.error(f"evidence: {sentence}")
        if culprit.message and not any(culprit.message in line for line in culprit.traceback):
            self.error(f"it reported: {culprit.message}")
        lines, title = culprit.traceback, "traceback"
        if self._ranks.has_shown(culprit.rank, lines):
            self.error(f"its traceback stands above: {last_error(lines)}")
            return
        if not lines:
            if self._ranks.has_said(culprit.last_lines):
                self.error("what it said of its error stands above")
                return
            lines, title = culprit.last_lines, "last lines"
            if culprit.last_lines_of != "stderr":
                title = f"last lines ({culprit.last_lines_of})"
        if lines:
            self.show(f"{title} of {culprit.worker}:", lines)

    def _log(self, level: int, message: str, *, is_event: bool = True) -> None:
        if level >= _LEVELS["info"]:
            self._ranks.flush()  # the ranks wrote these lines before this one
        if level >= _LEVELS["info"] and is_event:
            self.telemetry.record("note", level=level, text=cleaned(message))
        if level < self._level:
            return
        self._display.put(Said(time.time(), level, cleaned(message)))


def _servers(state: RunState) -> str:
    """Describe the servers beside the workers, and how often they were started again; empty without any."""
    words = []
    for role in dict.fromkeys(one.role for one in state.servers.values()):
        of_role = [one for one in state.servers.values() if one.role == role]
        restarts = sum(one.num_restarts for one in of_role)
        again = f", started again {count(restarts, 'time')}" if restarts else ""
        words.append(f"{role}: {count(len(of_role), 'server')}{again}")
    return "; ".join(words)

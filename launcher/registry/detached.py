"""A job in a process of its own, which outlives the terminal and the command that started it.

[Note: The two processes] `dslaunch --detach` makes the job's folder and forks twice, before it has any
thread. The job's process leads a session of its own, reads nothing, and shows everything in its journal. The
command in front reads on a pipe how the start goes, shows what the journal has of it meanwhile, and ends when
all workers run or the job has ended. The pipe's end without a word means that the job's process was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import click

from ..errors import LaunchError
from ..options import Options
from ..output.console import Console
from ..wording import cleaned
from .holder import Process
from .journal import JournalDisplay, JournalFile
from .journal_reader import JournalReader
from .own_entry import EntryWatch, OwnEntry
from .record import JobState
from .replay import Choice, Replay

STRAY_FILE = "stray"  # output of the job's process and its helpers past the console
EXIT_LOST = 137  # exit code of a program that SIGKILL ended; no file has it
_INTERRUPTED = 130
_POLL_S = 0.1
_LAST_WORDS_S = 0.5
_DRAIN_S = 10.0
_FIRST_OWN_FD = 3


class News(NamedTuple):
    """The message of the job's process to the command in front: `code` None: all workers run."""

    code: int | None
    message: str = ""


def start_apart(folder: Path, options: Options, run: Callable[[Options, Console], int]) -> News | None:
    """Run the job in a process of its own; return when all its workers run, or when it has ended.

    None: its process was killed. Called before this process has a thread.
    """
    inherited = _inherited_fds()
    heard, told = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # From before the fork on: the job has a record, so it can be seen to start, before this process goes on.
    with _passing_on(folder) as pass_on:
        between = os.fork()
        if between == 0:
            try:
                os.setsid()
                if os.fork():
                    os._exit(0)
                os.close(heard)
                _be_job(folder, options, run, Front(told), inherited)
            finally:
                os._exit(1)
        os.close(told)
        os.waitpid(between, 0)
        try:
            return _show_start(folder, heard, pass_on)
        finally:
            os.close(heard)


# The command in front.


def _show_start(folder: Path, heard: int, pass_on: Callable[[], object]) -> News | None:
    replay, reader = Replay(Choice(has_ranks=False)), JournalReader(folder)
    data = b""
    while not data.endswith(b"\n"):
        pass_on()
        replay.show(reader.entries())
        if select.select([heard], [], [], _POLL_S)[0]:
            more = os.read(heard, 1 << 16)
            if not more:
                break
            data += more
    news = News(**json.loads(data)) if data.endswith(b"\n") else None
    _show_last_words(replay, reader, is_started=news is not None and news.code is None)
    replay.writer.drain(_DRAIN_S)
    return news


def _show_last_words(replay: Replay, reader: JournalReader, *, is_started: bool) -> None:
    """Show the journal's part about the start; its end may be on its way to the disk."""
    deadline = time.monotonic() + _LAST_WORDS_S
    is_over = False
    while not is_over:
        is_over = not is_started or time.monotonic() > deadline
        for one in reader.entries():
            if is_started and one[0] == "s":
                return
            replay.show([one])
        time.sleep(0.01)


@contextlib.contextmanager
def _passing_on(folder: Path) -> Iterator[Callable[[], object]]:
    """Keep Ctrl-C for the job while it starts; the yielded function passes on what the job can get by now."""
    kept: list[int] = []

    def pass_on() -> None:
        with contextlib.suppress(OSError):  # the job's process has not come so far
            while kept:
                with Process(folder) as process:
                    process.signal(kept[0])
                del kept[0]

    def receive(number: int, _: FrameType | None) -> None:
        kept.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield pass_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        pass_on()


# The job.


def _be_job(
    folder: Path,
    options: Options,
    run: Callable[[Options, Console], int],
    front: Front,
    inherited: list[int],
) -> NoReturn:
    news = News(1, "the job ended by a fault of dslaunch")
    try:
        reads_hosts = options.hostfile == "-"  # from standard input, which a job cannot use
        is_watched = os.isatty(2)
        _leave_terminal(folder, keeps_stdin=reads_hosts)
        entry = OwnEntry(folder, options, is_detached=True)

        def tell_started() -> None:
            front.tell(News(None))
            _close(inherited)
            if reads_hosts:
                _be_without_input()

        news = _run(entry, options, run, tell_started, is_watched=is_watched)
    except LaunchError as error:
        news = News(error.exit_code, str(error))
    except KeyboardInterrupt:
        news = News(_INTERRUPTED, "interrupted: nothing was started")
    except BaseException:
        traceback.print_exc()
    finally:
        front.tell(news)
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(news.code or 0)


def _run(
    entry: OwnEntry,
    options: Options,
    run: Callable[[Options, Console], int],
    tell_started: Callable[[], None],
    *,
    is_watched: bool,
) -> News:
    watch = EntryWatch(lambda: entry)
    watch.on_started = tell_started
    try:
        file = JournalFile(entry.folder, options.logs, on_problem=entry.tell_problem)
    except OSError as error:
        message = f"{entry.folder}: the output of the job cannot be kept there: {error.strerror}; make room"
        entry.change(state=JobState.ENDED, ended_at=time.time(), exit_code=2, verdict=message)
        raise LaunchError(message) from None
    console = Console(
        log_level=options.log_level,
        logs=options.logs,
        display=lambda writer: JournalDisplay(writer, file, has_status_line=is_watched),
        watch=watch,
    )
    code, message = 1, ""
    try:
        code = run(options, console)
    except LaunchError as error:
        code, message = error.exit_code, str(error)
    except KeyboardInterrupt:
        code, message = _INTERRUPTED, "interrupted: nothing was started"
    except click.exceptions.Exit as end:  # after a signal; the end of the job was reported
        code = end.exit_code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        message = (
            f"{type(error).__name__} in dslaunch itself; {entry.folder / STRAY_FILE} says where; report it"
        )
    has_started = entry.record.started_at > 0
    if message and has_started:  # otherwise the command in front reports it
        console.error(message)
    console.drain(_DRAIN_S)
    verdict = cleaned(message) or entry.record.verdict
    entry.change(state=JobState.ENDED, ended_at=time.time(), exit_code=code, verdict=verdict)
    return News(code, message)


def _leave_terminal(folder: Path, *, keeps_stdin: bool) -> None:
    """Take this process off the terminal: none of its files is there, and no signal of a terminal ends it."""
    ignored = (signal.SIGHUP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGQUIT)
    for one in ignored:
        signal.signal(one, signal.SIG_IGN)
    for one in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored, as after `&`
        signal.signal(one, signal.default_int_handler)
    if not keeps_stdin:
        _be_without_input()
    fd = os.open(
        folder / STRAY_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)


def _be_without_input() -> None:
    fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(fd, 0)
    os.close(fd)


def _inherited_fds() -> list[int]:
    """List descriptors that we were started with beside the three streams: perhaps pipes whose reader awaits
    the end.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) >= _FIRST_OWN_FD and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def _close(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())


class Front:
    """The command in front, which gets one message only, and may be gone."""

    def __init__(self, told: int) -> None:
        self._told: int | None = told

    def tell(self, news: News) -> None:
        if self._told is None:  # its number may be another file's by now
            return
        told, self._told = self._told, None
        with contextlib.suppress(OSError):
            os.write(told, json.dumps(news._asdict()).encode() + b"\n")
        os.close(told)

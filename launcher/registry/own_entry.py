"""A job's own folder in the registry, kept by the process of the job."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..inputs.line_prefix import Origin
from ..options import Options
from ..options.end import without_secrets
from ..output.event_files import EventRing
from ..telemetry.telemetry import Telemetry
from . import holder
from .record import JobRecord, JobState, name_from, this_boot, this_host, write_record
from .state_folder import alone_in, writable_folder

_MAX_TRIES = 100
EVENTS = "events"
EVENTS_BYTES = 8 << 20  # size of each of the two files
_SIGN_EVERY_S = 6 * 3600.0  # far less than known_jobs.KEPT_S, which is days
MAX_HOSTS = 10_000  # hosts whose names are kept


def make_folder(options: Options) -> Path:
    """Make a new folder `<name>.<key>` among the records of this user.

    A job without a given name is named after its program, several as `train`, `train-2`, ...
    Errors: LaunchError if there can be none
    """
    jobs = writable_folder()
    with alone_in(jobs):
        name = options.detach.name or _free_name(jobs, options)
        for _ in range(_MAX_TRIES):
            folder = jobs / f"{name}.{os.urandom(2).hex()}"
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                continue
            except OSError as error:
                raise LaunchError(f"{folder}: {error.strerror}; make room there") from None
            return folder
    raise LaunchError(f"there are too many jobs called {name}; choose another --name")


def _free_name(jobs: Path, options: Options) -> str:
    base = name_from(options.program, is_module=options.is_module)
    taken = {one.rpartition(".")[0] for one in os.listdir(jobs)}
    number, name = 1, base
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    return name


class OwnEntry:
    """The folder of the job that this process is. No method raises after `__init__`: a failed write is noted
    in `problem`.
    """

    def __init__(self, folder: Path, options: Options, *, is_detached: bool) -> None:
        """Errors: LaunchError if the folder cannot be used"""
        self.folder = folder
        self._lock = threading.Lock()  # the journal's thread reports problems
        self._is_over = threading.Event()
        self.problem = ""
        name, _, key = folder.name.rpartition(".")
        now = time.time()
        self.record = JobRecord(
            name=name,
            key=key,
            host=this_host(),
            boot_id=this_boot(),
            pid=os.getpid(),
            command=("dslaunch", *without_secrets(sys.argv[1:])),
            cwd=_cwd(),
            launcher="no_ssh" if options.rendezvous.no_ssh else options.backend.launcher.name,
            is_detached=is_detached,
            console="" if is_detached else _place_of_stdout(),
            shown=_shown(options),
            began_at=now,
        )
        try:
            self._hold = holder.hold(folder)
            if is_detached:  # in the foreground the record is first written with its facts, a moment later
                write_record(folder, self.record)
            threading.Thread(target=self._give_signs, name="signs of life", daemon=True).start()
        except OSError as error:
            raise LaunchError(
                f"{folder}: the record of the job cannot be kept there: {error.strerror}; set XDG_STATE_HOME "
                "to a folder on a local disk with room"
            ) from None

    def _give_signs(self) -> None:
        """Show machines that share the records that the job lives, by a new time of its hold."""
        while not self._is_over.wait(_SIGN_EVERY_S):
            with contextlib.suppress(OSError):
                os.utime(self._hold)

    def change(self, **changes: Any) -> None:
        """Write the record with these fields changed."""
        with self._lock:
            self.record = self.record._replace(**changes)
            try:
                write_record(self.folder, self.record)
            except OSError as error:
                self.problem = f"{self.folder}: the record of the job is out of date: {error.strerror}"

    def abandon(self, exit_code: int) -> None:
        """Write the last record of a process that ends now, without waiting for a thread or other work."""
        if not self.record.is_detached:
            self.remove()
            return
        verdict = "its dslaunch was told a third time to end, and did at once; the hosts end its workers"
        ended = self.record._replace(
            state=JobState.ENDED, ended_at=time.time(), exit_code=exit_code, verdict=verdict
        )
        with contextlib.suppress(OSError):
            write_record(self.folder, ended)

    def tell_problem(self, problem: str) -> None:
        """Report output that could not be kept; as a sentence once, and again when it has changed."""
        if problem != self.record.problem:
            self.change(problem=problem)

    def remove(self) -> None:
        import shutil

        self._is_over.set()
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._hold)


class EntryWatch:
    """Keeps the record of a job up to date: see output/job_watch.py."""

    def __init__(self, make: Callable[[], OwnEntry]) -> None:
        """`make` makes the entry when the first attempt begins."""
        self._make = make
        self.entry: OwnEntry | None = None
        self._attempt = -1
        self._is_tried = False
        self._warn: Callable[[str], None] = lambda _: None
        self.on_started: Callable[[], None] = lambda: None

    def began(
        self,
        origins: tuple[Origin, ...],
        *,
        log_folder: Path | None,
        warn: Callable[[str], None],
        telemetry: Telemetry,
    ) -> None:
        self._warn = warn
        if self._try_make() and self.entry is not None:
            self._keep_events(self.entry.folder, telemetry)
        self._attempt += 1
        hosts = tuple(dict.fromkeys(one.host for one in origins))[:MAX_HOSTS]
        self._change(
            state=JobState.STARTING,
            attempt=self._attempt,
            hosts=hosts,
            num_ranks=sum(not one.role for one in origins),
            first_rank=min((one.rank for one in origins), default=0),
            log_folder="" if log_folder is None else str(log_folder.absolute()),
        )

    def started(self) -> None:
        self._change(state=JobState.RUNNING, started_at=time.time())
        self.on_started()

    def stopping(self) -> None:
        self._change(state=JobState.STOPPING)

    def reported(self, failure: str) -> None:
        if self.entry is not None and self.entry.record.is_detached:  # otherwise the record is removed now
            self._change(verdict=failure)

    def abandoned(self, exit_code: int) -> None:
        if self.entry is not None:
            self.entry.abandon(exit_code)

    def _change(self, **changes: Any) -> None:
        if self.entry is None:
            return
        before = self.entry.problem
        self.entry.change(**changes)
        if self.entry.problem and not before:
            self._warn(self.entry.problem)

    def _keep_events(self, folder: Path, telemetry: Telemetry) -> None:
        """Keep the events for commands that look at the job while it runs."""
        try:
            ring = EventRing(
                folder / EVENTS,
                max_bytes=EVENTS_BYTES,
                opening=lambda: telemetry.opening,
                on_problem=lambda problem: self._warn(problem),
            )
        except OSError as error:
            self._warn(f"`dslaunch top` will show little of this job: {folder / EVENTS}: {error.strerror}")
            return
        telemetry.add(ring)

    def _try_make(self) -> bool:
        """Make the entry at the first call; tell whether this was it."""
        if self._is_tried:
            return False
        self._is_tried = True
        try:
            self.entry = self._make()
        except LaunchError as error:
            self._warn(f"`dslaunch jobs` will not show this job: {error}")
        return True


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted, which the plan of the job will report
        return ""


def _shown(options: Options) -> tuple[tuple[int, int], ...] | None:
    logs = options.logs
    if logs.ranks is None:
        return None if logs.each_rank_dir is None else ()
    return tuple((one.start, one.stop - 1) for one in logs.ranks)


def _place_of_stdout() -> str:
    """Return the place where the user finds the output of a job in the foreground."""
    try:
        return os.ttyname(1) if os.isatty(1) else os.readlink("/proc/self/fd/1")
    except OSError:
        return ""

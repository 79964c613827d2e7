"""Files of a job's events: docs/design/events.md."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import LaunchError
from ..node.system.plain_file import mode_in, open_plain, refuse_foreign
from ..telemetry.telemetry import Telemetry, as_line
from ..telemetry.thinning import Thinned
from .job_report import check_place, is_of_system
from .writer import Writer

MAX_WAITING = 2000  # events that may wait for the disk; further ones are lost, and counted
CLOSE_S = 5.0  # wait for a slow disk at the end

EVENTS = "events.jsonl"  # in the folder of a run


def keep_events(telemetry: Telemetry, folder: Path, *, on_problem: Callable[[str], None]) -> None:
    """Keep the events of a run in its folder of --log_dir, with fewer numbers as it gets older.

    Errors: LaunchError if the file cannot be made
    """
    mode = mode_in(str(folder.parent))
    telemetry.add(Thinned(_event_file(folder / EVENTS, "--log_dir", mode=mode, on_problem=on_problem)))


def write_events(telemetry: Telemetry, path: Path, *, on_problem: Callable[[str], None]) -> None:
    """Write all events into the file of --events.

    Errors: LaunchError if it cannot be written
    """
    check_place(path, option="--events", may_be_pipe=True)
    telemetry.add(_event_file(path, "--events", mode=mode_in(str(path.parent)), on_problem=on_problem))


def _event_file(path: Path, option: str, *, mode: int, on_problem: Callable[[str], None]) -> EventFile:
    is_own = not (is_of_system(path.parent) or path.is_fifo())

    def open_file() -> int:
        if not is_own:
            return _open_of_others(path)
        fd = open_plain(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
        try:
            refuse_foreign(os.fstat(fd), str(path))
            os.ftruncate(fd, 0)
        except OSError:
            os.close(fd)
            raise
        return fd

    try:
        return EventFile(path, open_file, on_problem=on_problem, is_own=is_own)
    except OSError as error:
        raise LaunchError(f"{option}={path}: cannot be written: {error.strerror}") from None


def _open_of_others(path: Path) -> int:
    """Open a file that other programs write to or read from as well: /dev/stdout, a pipe, or /dev/fd/63 as
    the shell makes it of `>(jq .)`. Errors: OSError
    """
    number = _number_of_descriptor(path)
    # Use the descriptor itself: a newly opened file would have a writing position of its own
    if number is not None:
        return os.dup(number)
    is_of_others = not is_of_system(path.parent)  # the system's links lead where the user means
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(path, flags | (os.O_NOFOLLOW if is_of_others else 0))
    except OSError as error:
        if error.errno == errno.ENXIO and path.is_fifo():
            raise OSError(error.errno, "no process reads this pipe; start the one that does first") from None
        raise
    os.set_blocking(fd, True)
    return fd


def _number_of_descriptor(path: Path) -> int | None:
    """Return the descriptor of a name of one of this process's open files; None for other names."""
    if path.name in ("stdout", "stderr"):
        path = Path(os.readlink(path)) if path.is_symlink() else path
    own = ("/dev/fd", "/proc/self/fd", f"/proc/{os.getpid()}/fd")
    return int(path.name) if str(path.parent) in own and path.name.isdigit() else None


class EventFile:
    """A file with a line for each event, written in a thread of its own.

    A job is not stopped because the file cannot be written: lost events are counted, reported to `on_problem`
    once, and noted in the file as soon as it can be written again.
    """

    def __init__(
        self,
        path: Path,
        open_file: Callable[[], int],
        *,
        on_problem: Callable[[str], None],
        is_own: bool = True,
    ) -> None:
        """`open_file` opens it for appending. `is_own`: only this process writes to the file, so an
        unfinished line may be cut off.

        Errors: OSError
        """
        self._path, self._on_problem, self._is_own = path, on_problem, is_own
        self._fd = open_file()
        self._size = os.fstat(self._fd).st_size
        self._writer = Writer()
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._num_lost = 0
        self._has_told = False

    def take(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                self._num_lost += 1
                return
            self._num_waiting += 1
        self._writer.put(self, as_line(event), self._written)

    def close(self) -> None:
        if not self._writer.drain(CLOSE_S):
            self._writer.give_up()
            self._tell("the disk does not take them")
            return  # the writer's thread still uses the file
        os.close(self._fd)

    # Methods of the writer's thread.

    def write(self, data: bytes) -> None:
        lost = self._num_lost
        try:
            self._append((as_line({"event": "lost", "events": lost}) if lost else b"") + data)
        except OSError as error:
            with self._lock:
                self._num_lost += data.count(b"\n")
            self._tell(error.strerror or str(error))
            return
        with self._lock:
            self._num_lost -= lost

    def failure(self, error: OSError) -> NoReturn:
        raise AssertionError(f"a file of events that cannot be written ends no job: {error}")

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            self._cut()
            raise
        self._size += len(data)

    def _cut(self) -> None:
        """Cut off an unfinished last line, so that the lines after it can be read."""
        if self._is_own:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)

    def _written(self) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _tell(self, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._on_problem(f"{self._path}: not all events are kept there: {why}")


class EventRing(EventFile):
    """Two files of at most `max_bytes`: a full one becomes `NAME.old`, and the next one begins with the
    records that its events refer to.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        opening: Callable[[], Sequence[Mapping[str, Any]]],
        on_problem: Callable[[str], None],
    ) -> None:
        """Errors: OSError"""
        self._max_bytes, self._opening = max_bytes, opening
        super().__init__(path, lambda: _make(path), on_problem=on_problem)

    def _append(self, data: bytes) -> None:
        if self._size + len(data) > self._max_bytes:
            self._turn()
        super()._append(data)

    def _turn(self) -> None:
        """Begin the next file; if that fails the present one goes on, and the error is reported."""
        new = self._path.with_name(f"{self._path.name}.new")
        fd = _make(new)
        os.replace(self._path, self._path.with_name(f"{self._path.name}.old"))
        os.replace(new, self._path)
        os.close(self._fd)
        self._fd, self._size = fd, 0
        super()._append(b"".join(map(as_line, self._opening())))


def _make(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

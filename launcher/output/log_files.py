"""Files with each rank's output, on the launching machine.

    DIR/<run>/attempt_<n>/rank<nnn>.stdout.log     --log_dir DIR; attempts count from 0,
                                                   <run> is the time of the start
    DIR/<run>/attempt_<n>/<role>.stdout.log        of a server; <role>-<host> if there are several
    DIR/<run>/report.json
    DIR/latest -> <run>
    DIR/<time>_rank<n>.log                         --enable_each_rank_log DIR: stdout and stderr, as DeepSpeed
                                                   names it; <time> is that of the attempt

The files hold whole lines in the order in which the rank wrote them. Of a line that carriage returns
overwrite (a progress bar) they hold the states that the console shows. They hold tracebacks too, so only this
user can read them, unless the folder was made for others: plain_file.py, `mode_in`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ..errors import LaunchError
from ..inputs.line_prefix import STREAM_NAMES
from ..node.system.plain_file import mode_in, open_plain
from .writer import Writer

MAX_OPEN_FILES = 256  # a quarter of the 1024 that a process may have open by default; others are opened again
LATEST = "latest"
# Names of our run folders, to which the link `latest` may point
_RUN_NAME = re.compile(r"\d{8}-\d{6}(-\d+)?")
REPORT = "report.json"


class RankFiles:
    """The files of one run, written by a thread of their own: a slow disk does not hold up the console."""

    def __init__(self, *, log_dir: str | None, each_rank_dir: str | None) -> None:
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._each_rank_dir = None if each_rank_dir is None else Path(each_rank_dir)
        self.folder: Path | None = None  # this run's, below log_dir
        self.warning = ""
        self.places: tuple[Path, ...] = ()  # the folders with the files of the latest attempt
        self._num_attempts = 0
        self._writer = Writer()
        self._files = _OpenFiles()
        self._sinks: dict[tuple[int, int], list[_LogFile]] = {}  # by rank and stream

    @property
    def failure(self) -> LaunchError | None:
        """Return why files cannot be written any more, if that is so."""
        return self._writer.failure

    def begin(self, ranks: Sequence[int], *, servers: Mapping[int, str] = MappingProxyType({})) -> None:
        """Make the folders and empty files of the next attempt. `servers`: the beginning of the names of each
        server's files, by its number.

        Errors: LaunchError if that is not possible
        """
        whose = {**{rank: f"rank{rank}" for rank in ranks}, **servers}
        sinks: dict[tuple[int, int], list[_LogFile]] = {
            (rank, stream): [] for rank in whose for stream in STREAM_NAMES
        }
        self.places = () if self._each_rank_dir is None else (self._each_rank_dir,)
        if self._log_dir is not None:
            if self.folder is None:
                self.folder = _make_run_folder(self._log_dir)
                self.warning = _link_latest(self.folder)
            folder = self.folder / f"attempt_{self._num_attempts}"
            _make_folder(folder, "--log_dir")
            self.places = (folder, *self.places)
            mode = mode_in(str(self._log_dir))
            num_digits = max(3, len(str(max(ranks))))
            for (rank, stream), files in sinks.items():
                start = servers.get(rank, f"rank{rank:0{num_digits}}")
                name = f"{start}.{STREAM_NAMES[stream]}.log"
                files.append(_LogFile(folder / name, "--log_dir", self._files, mode=mode))
        if self._each_rank_dir is not None:
            option = "--enable_each_rank_log"
            _make_folder(self._each_rank_dir, option)
            mode = mode_in(str(self._each_rank_dir))
            for rank, path in _paths_by_time(self._each_rank_dir, whose).items():
                file = _LogFile(path, option, self._files, mode=mode)
                for stream in STREAM_NAMES:
                    sinks[rank, stream].append(file)
        for file in {one for files in sinks.values() for one in files}:
            file.create()
        self._num_attempts += 1
        self._sinks = sinks

    def put(self, rank: int, stream: int, data: bytes, on_done: Callable[[], None] | None) -> None:
        """Take whole lines of one rank; `on_done` is called when they are written."""
        files = self._sinks[rank, stream]
        if on_done is not None and len(files) > 1:
            on_done = after(len(files), on_done)
        for file in files:
            # After a first failure the job is being stopped, and a second one would bring no news.
            self._writer.put(file, b"" if self._writer.failure else data, on_done)

    def give_up_if_stuck(self, timeout_s: float) -> None:
        """Stop writing files if nothing could be written for `timeout_s`."""
        if self._writer.stuck_s > timeout_s:
            self._writer.give_up()

    def finish(self, timeout_s: float = float("inf")) -> bool:
        """Wait until all is written and the files are closed; False if that took too long."""
        self._writer.put(self._files, b"")
        return self._writer.drain(timeout_s)


def after(count: int, call: Callable[[], None]) -> Callable[[], None]:
    """Return a function whose call number `count`, from any thread, calls `call`."""
    numbers = itertools.count(1)  # two threads cannot get the same number from it

    def one() -> None:
        if next(numbers) == count:
            call()

    return one


class _OpenFiles:
    """Descriptors of log files, the latest used ones.

    As a sink it closes them all. Used by the writer's thread only.
    """

    def __init__(self) -> None:
        self._fds: dict[_LogFile, int] = {}  # the one used longest ago first
        allowed = os.sysconf("SC_OPEN_MAX")  # this process's limit, most of which it needs for other purposes
        self._most = MAX_OPEN_FILES if allowed < 0 else max(1, min(MAX_OPEN_FILES, allowed // 4))

    def fd_of(self, file: _LogFile) -> int:
        fd = self._fds.pop(file, None)
        if fd is None:
            while len(self._fds) >= self._most:
                os.close(self._fds.pop(next(iter(self._fds))))
            fd = file.open()
        self._fds[file] = fd
        return fd

    def write(self, data: bytes) -> None:
        first: OSError | None = None
        while self._fds:
            try:
                os.close(self._fds.popitem()[1])
            except OSError as error:  # a network file system may only now find that its disk is full
                first = first or error
        if first is not None:
            raise first

    def failure(self, error: OSError) -> LaunchError:
        return LaunchError(f"cannot write the log files to their end: {error.strerror}; free some space")


class _LogFile:
    """One file that lines are added to."""

    def __init__(self, path: Path, option: str, files: _OpenFiles, *, mode: int) -> None:
        self._path = path
        self._mode = mode
        self._option = option
        self._files = files

    def create(self) -> None:
        try:
            os.close(self.open(os.O_EXCL))
        except OSError as error:
            raise self.failure(error) from None

    def open(self, more_flags: int = 0) -> int:
        return open_plain(str(self._path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | more_flags, self._mode)

    def write(self, data: bytes) -> None:
        fd = self._files.fd_of(self)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def failure(self, error: OSError) -> LaunchError:
        return LaunchError(
            f"cannot write to {self._path}: {error.strerror}; free some space, or give "
            f"{self._option} another folder"
        )


def _make_run_folder(log_dir: Path) -> Path:
    """Make a folder of its own for each job, named by the time so that they sort."""
    _make_folder(log_dir, "--log_dir")
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = log_dir / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_make(folder, "--log_dir", error) from None
        return folder
    raise AssertionError("there is always another number")


def _paths_by_time(folder: Path, whose: Mapping[int, str]) -> dict[int, Path]:
    """Return DeepSpeed's names. If another attempt or job has files of that second, take the next free
    second: names must not be shared.
    """
    for second in itertools.count(int(time.time())):
        name = time.strftime("%Y%m%d%H%M%S", time.localtime(second))
        paths = {rank: folder / f"{name}_{one}.log" for rank, one in whose.items()}
        if not any(os.path.lexists(path) for path in paths.values()):
            return paths
    raise AssertionError("there is always another second")


def _make_folder(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_make(folder, option, error) from None


def _cannot_make(folder: Path, option: str, error: OSError) -> LaunchError:
    if isinstance(error, FileExistsError):
        return LaunchError(f"{option}: {folder} is a file; give a folder")
    return LaunchError(
        f"{option}: cannot make {folder}: {error.strerror}; give a folder that can be written to"
    )


def _link_latest(folder: Path) -> str:
    """Point the link `latest`, beside the folder, to it; return a warning if that is not possible."""
    link = folder.parent / LATEST
    new = folder.parent / f".{folder.name}.{LATEST}"
    try:
        if os.path.lexists(link) and not (link.is_symlink() and _RUN_NAME.fullmatch(os.readlink(link))):
            return f"{link} does not point to this run: it is there already and not ours"
        new.symlink_to(folder.name)
    except OSError as error:
        return f"{link} does not point to this run: {error.strerror}"
    try:
        new.replace(link)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        return f"{link} does not point to this run: {error.strerror}"
    return ""

"""Files that hosts send when a job is over, put into a folder of each host's own."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Sequence
from typing import BinaryIO

from ..node.system.kernel_file import read_text
from ..wire.frames import Collect, Collected, Found, ProtocolError, bytes_of, text_of
from ..wire.manifest import unpack_piece
from ..wording import count, shown_size
from .ignore import OUR_FILE
from .target import SyncTarget

MAX_SAME_NAMES = 1000
MAX_PATH_BYTES = 4095  # the kernel's limit
MAX_BASE_BYTES = 255
_PART = b".dslaunch-part"
_KEPT_HERE = b"""\
# Brought from hosts by dslaunch --collect; --sync sends nothing of this folder as long as this file is here.
*
"""


class _Arriving:
    """A file on its way from one host."""

    def __init__(self) -> None:
        self.file: BinaryIO | None = None
        self.path = b""  # its final path
        self.found: Found | None = None
        self.end: Collected | None = None
        self.is_lost = False
        self.lock = threading.Lock()

    @property
    def part(self) -> bytes:
        """Return its path until all of it has come."""
        folder, name = os.path.split(self.path)
        return os.path.join(folder, name[: MAX_BASE_BYTES - len(_PART)] + _PART)


class Collector:
    """The collected files of all attempts of a job. `receive_...` is called by each host's thread, the rest
    by one.
    """

    def __init__(
        self, patterns: Sequence[str], place: bytes, *, option: str = "--collect", is_own: bool = False
    ) -> None:
        """`option` is the one that asked for it. `is_own`: the files are in the agents' own folders."""
        self._patterns, self.option, self._is_own = list(patterns), option, is_own
        self._place = os.path.abspath(place)
        self._own: set[bytes] = set()  # written by this job
        self._arriving: dict[SyncTarget, _Arriving] = {}
        self.num_files = self.num_bytes = 0
        self.problems: list[str] = []
        self.renamed: list[str] = []

    def ask(self, host: SyncTarget) -> None:
        """Ask a host for its files: the job is over there."""
        self._arriving[host] = _Arriving()
        host.send(Collect(self._patterns, "" if self._is_own else text_of(self._place), self._is_own))

    def is_asked(self, host: SyncTarget) -> bool:
        return host in self._arriving and self._arriving[host].end is None

    def receive_name(self, host: SyncTarget, found: Found) -> None:
        """Take a name. Errors: ProtocolError for a name that leads out of the host's folder"""
        arriving = self._arriving[host]
        name = bytes_of(found.name).lstrip(b"/")
        parts = name.split(b"/")
        if b"\0" in name or any(one in (b"", b".", b"..") for one in parts) or len(name) > MAX_PATH_BYTES:
            raise ProtocolError(
                f"its agent sent the file {found.name[:200]!r}, which is no name below a folder"
            )
        with arriving.lock:
            self._finish(arriving)
            if not arriving.is_lost:
                arriving.path = os.path.join(self._place, os.fsencode(host.name), name)
                arriving.found = found
                self._open(arriving)

    def _open(self, arriving: _Arriving) -> None:
        try:
            self._make_place()
            _make_folders(os.path.dirname(arriving.path))
            with contextlib.suppress(FileNotFoundError):  # left by a job that was killed
                os.unlink(arriving.part)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(arriving.part, flags | os.O_NOFOLLOW, 0o600)
            arriving.file = os.fdopen(fd, "wb")
        except OSError as error:
            self._lose(arriving, error)

    def _make_place(self) -> None:
        """Make the folder and mark it, so that later jobs with another --collect_to do not send it.

        Errors: OSError
        """
        _make_folders(os.path.dirname(self._place))
        try:
            os.mkdir(self._place)
        except FileExistsError:
            return
        mark = os.path.join(self._place, OUR_FILE)
        fd = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "wb") as file:
            file.write(_KEPT_HERE)

    def receive_piece(self, host: SyncTarget, piece: bytes) -> None:
        """Take a piece. Errors: ProtocolError if it is no piece"""
        arriving = self._arriving[host]
        try:
            data = unpack_piece(piece)
        except ValueError as error:
            raise ProtocolError(f"its agent sent what is no piece of a file: {error}") from None
        with arriving.lock:
            if arriving.file is not None:
                try:
                    arriving.file.write(data)
                except OSError as error:
                    self._lose(arriving, error)
                self.num_bytes += len(data)

    def end(self, host: SyncTarget, item: Collected) -> None:
        """Note that the host has sent everything."""
        arriving = self._arriving[host]
        with arriving.lock:
            self._finish(arriving)
            arriving.end = item
        self.problems += [f"{host.name}: {one}" for one in item.problems]

    def lose(self, host: SyncTarget) -> None:
        """Give the host up: no more files come from it."""
        arriving = self._arriving[host]
        with arriving.lock:
            arriving.is_lost = True
            if arriving.file is not None:
                arriving.file.close()
                with contextlib.suppress(OSError):
                    os.unlink(arriving.part)
                arriving.file = None
        self.problems.append(f"{host.name}: what had not come when it was lost")

    @property
    def summary(self) -> str:
        ended = [one.end for one in self._arriving.values() if one.end is not None]
        unmatched = [
            pattern
            for place, pattern in enumerate(self._patterns)
            if ended and not any(one.num_of_pattern[place : place + 1] > [0] for one in ended)
        ]
        words = f"; no file matches {', '.join(unmatched)} on any host" if unmatched else ""
        return (
            f"collected {count(self.num_files, 'file')}, {shown_size(self.num_bytes)}, of "
            f"{count(len(ended), 'host')} into {os.fsdecode(self._place)}{words}"
        )

    def begin(self) -> None:
        """Begin another attempt: files that this job wrote before may be written again."""
        self._arriving.clear()
        self.problems.clear()
        self.renamed.clear()
        self.num_files = self.num_bytes = 0

    def _finish(self, arriving: _Arriving) -> None:
        if arriving.file is None or arriving.found is None:
            return
        part = arriving.part
        try:
            arriving.file.close()
            with contextlib.suppress(OSError, OverflowError):  # a time that no file here can have
                os.utime(part, ns=(arriving.found.mtime_ns, arriving.found.mtime_ns))
            # Permissions as for new files here: the host gives these bits, but none that runs as another
            # user.
            self._put(part, arriving.path, arriving.found.mode & 0o777 & ~_umask())
            self.num_files += 1
        except OSError as error:
            self._lose(arriving, error)
        arriving.file = None

    def _put(self, part: bytes, path: bytes, mode: int) -> None:
        """Put the file under its name, or, where another file has that, with a number after it."""
        for number in range(MAX_SAME_NAMES):
            name = path + (b".%d" % number if number else b"")
            if name in self._own or not os.path.lexists(name):
                os.chmod(part, mode)
                os.replace(part, name)
                self._own.add(name)
                if number:
                    what = f"{os.fsdecode(path)} is there from before and differs"
                    self.renamed.append(f"{what}: this one is {os.fsdecode(name)}")
                return
            if _are_equal(part, name):
                os.unlink(part)
                return
        raise FileExistsError(17, "there are too many files of that name already", path)

    def _lose(self, arriving: _Arriving, error: OSError) -> None:
        self.problems.append(f"{os.fsdecode(arriving.path)} cannot be written: {error.strerror or error}")
        if arriving.file is not None:
            with contextlib.suppress(OSError):
                arriving.file.close()
        with contextlib.suppress(OSError):
            os.unlink(arriving.part)
        arriving.file = None


def _make_folders(path: bytes) -> None:
    """Make folders as os.makedirs does, however deep they are. Errors: OSError"""
    missing = []
    if len(path) > MAX_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for one in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(one)


def _umask() -> int:
    """Read the umask without setting it, which threads would see. A system that does not show it has a usual
    one.
    """
    for line in read_text("/proc/self/status").splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def _are_equal(one: bytes, other: bytes) -> bool:
    import filecmp

    return os.path.isfile(other) and not os.path.islink(other) and filecmp.cmp(one, other, shallow=False)

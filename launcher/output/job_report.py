"""The report of a job for --report and --log_dir: its end, and the ends of its attempts."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..errors import LaunchError
from ..job.verdict import Verdict, signal_name
from ..node.system.plain_file import mode_in, open_plain, refuse_foreign

_NO_NEW_NAME = (errno.EACCES, errno.EPERM, errno.EROFS)  # in a folder whose files may be written all the same


class EndedAttempt(NamedTuple):
    """One start of the job and its end. `decision` is the sentence about the next one; empty: none.

    Units: seconds; `began_at` since the epoch
    """

    number: int
    hosts: tuple[str, ...]  # in the order of their ranks
    began_at: float
    duration_s: float
    verdict: Verdict
    decision: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "hosts": list(self.hosts),
            "began_at": datetime.fromtimestamp(self.began_at).astimezone().isoformat(timespec="milliseconds"),
            "duration_s": self.duration_s,
            **self.verdict.to_dict(),
            "decision": self.decision,
        }


class BegunAttempt:
    """One start of the job, from now on."""

    def __init__(self, *, hosts: tuple[str, ...], number: int = 0) -> None:
        self.hosts = hosts
        self.number = number
        self.began_at = time.time()
        self._began = time.monotonic()  # read from a clock that cannot be set

    @property
    def duration_s(self) -> float:
        """Seconds until now."""
        return time.monotonic() - self._began

    def end(self, verdict: Verdict, decision: str = "") -> EndedAttempt:
        return EndedAttempt(
            number=self.number,
            hosts=self.hosts,
            began_at=self.began_at,
            duration_s=self.duration_s,
            verdict=verdict,
            decision=decision,
        )


def report_of(
    attempts: Sequence[EndedAttempt],
    exit_code: int | None = None,
    interrupted_by: int | None = None,
    *,
    course: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the end of the job, which is that of its last attempt, and all attempts.

    `exit_code` is the command's where the next attempt could not be made, and `interrupted_by` the signal
    that came before it. `course` has keys on the job as a whole. The keys: docs/launch/failures.md.
    """
    last = attempts[-1].verdict.to_dict()
    if exit_code is not None:
        last["exit_code"] = exit_code
    if interrupted_by is not None:
        last["interrupted_by"] = signal_name(interrupted_by)
    return {**last, **course, "attempts": [one.to_dict() for one in attempts]}


def check_place(path: Path, *, option: str, may_be_pipe: bool = False) -> None:
    """Check, before the job, that a report can be written there.

    Errors: LaunchError if there is no folder for it, or no regular file of its name
    """
    folder = path.parent
    if path.is_symlink() and not is_of_system(folder):
        raise LaunchError(f"{option}={path} is a symbolic link; give the file itself")
    if path.is_dir():
        raise LaunchError(f"{option}={path} is a folder; give the name of a file")
    is_fit = path.is_file() or (may_be_pipe and path.is_fifo())
    if path.exists() and not is_fit and not is_of_system(folder):
        raise LaunchError(f"{option}={path} is no regular file; give the name of a file")
    if not folder.is_dir():
        raise LaunchError(f"{option}={path}: there is no folder {folder}; make it, or give another place")
    if is_fit and not is_of_system(folder) and path.is_file():
        try:
            refuse_foreign(path.stat(), str(path))
        except OSError as error:
            raise LaunchError(f"{option}={path}: cannot be written: {error.strerror}") from None
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise LaunchError(f"{option}={path}: you may not write there; give another place")


def write_report(
    path: Path,
    attempts: Sequence[EndedAttempt],
    *,
    option: str,
    exit_code: int | None = None,
    interrupted_by: int | None = None,
    course: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the report. Errors: LaunchError with `option`, if the file cannot be written"""
    text = json.dumps(report_of(attempts, exit_code, interrupted_by, course=course), indent=2) + "\n"
    try:
        if is_of_system(path.parent):  # /dev/stdout, or /dev/fd/63 as the shell makes it of `>(jq .)`
            path.write_text(text)
            return
        put_file(path, text.encode())
    except OSError as error:
        raise LaunchError(f"{option}={path}: cannot be written: {error.strerror}") from None


def put_file(path: Path, data: bytes) -> None:
    """Put the data into the file: all of it, or on a full disk the old content stays.

    Errors: OSError whose `strerror` is a clause that follows the path
    """
    old = _stat_plain(path)
    if old is not None:
        refuse_foreign(old, str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    mode = mode_in(str(path.parent)) if old is None else stat.S_IMODE(old.st_mode)
    try:
        fd = open_plain(str(partial), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        if old is None or error.errno not in _NO_NEW_NAME:
            raise
        with open(open_plain(str(path), os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(data)
        return
    try:
        with open(fd, "wb") as file:
            if old is not None:
                _become(fd, old)
            file.write(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _stat_plain(path: Path) -> os.stat_result | None:
    """Return the status of a regular file; None if there is none.

    Errors: OSError for a name of another kind of file
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return found


def _become(fd: int, old: os.stat_result) -> None:
    """Give the new file the owner and the permissions of the old one, whose name it gets."""
    with contextlib.suppress(PermissionError):  # another user's, in a folder where this one may write
        os.fchown(fd, old.st_uid, old.st_gid)
    with contextlib.suppress(PermissionError):
        os.fchmod(fd, stat.S_IMODE(old.st_mode))


def is_of_system(folder: Path) -> bool:
    """Tell whether only the system can create names in the folder, so that its links can be trusted."""
    found = folder.resolve()
    return found == Path("/dev") or found.is_relative_to("/proc")

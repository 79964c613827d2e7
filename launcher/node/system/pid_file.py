"""The file of --save_pid: where scripts find the process that runs a job on this host."""

from __future__ import annotations

import errno
import os

from .lean_stdlib import suppress
from .plain_file import open_plain

MAX_TRIES = 100  # if other processes make and remove the same file meanwhile
MAX_PID_BYTES = 64


class PidFileInUse(Exception):
    """The file is there, and the process it names runs."""

    def __init__(self, path: str, pid: int) -> None:
        super().__init__(f"{path} is there already, and process {pid} that it names runs")


def write_pid_file(launcher_pid: int, pid: int, *, folder: str = "/tmp") -> str:
    """Write `pid` into the file named for the launcher; return its path.

    A file left by a dead process is replaced.

    Anything else of that name stays: a link is not followed, a pipe is not waited for, and another user's
    file is theirs.
    Errors: PidFileInUse; OSError if it cannot be written
    Source: DeepSpeed 0.19.8 launcher/launch.py, `--save_pid`: the same name, so the same scripts find it.
    """
    path = os.path.join(folder, f"{launcher_pid}.deepspeed")
    for _ in range(MAX_TRIES):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            _remove_if_stale(path)
            continue
        try:
            os.write(fd, str(pid).encode())
        except OSError as error:
            os.unlink(path)
            raise OSError(error.errno, error.strerror, path) from None
        finally:
            os.close(fd)
        return path
    raise OSError(errno.EBUSY, "other jobs make and remove it all the time", path)


def _remove_if_stale(path: str) -> None:
    with suppress(FileNotFoundError):
        fd = open_plain(path, os.O_RDONLY)
        try:
            found = os.fstat(fd)
            text = os.read(fd, MAX_PID_BYTES).decode("ascii", "replace")
        finally:
            os.close(fd)
        if found.st_uid != os.geteuid():
            raise OSError(errno.EEXIST, "it is there already and belongs to another user", path)
        if text.isdigit() and os.path.exists(f"/proc/{text}"):
            raise PidFileInUse(path, int(text))
        now = os.lstat(path)
        if (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino):
            os.unlink(path)

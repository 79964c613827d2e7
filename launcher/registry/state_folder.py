"""The place of what dslaunch keeps for this user, such as the records of jobs: folders that no other user can
look into.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import LaunchError

VARIABLE = "XDG_STATE_HOME"
# Records of jobs; measured speeds of clusters; how long programs have stood still
JOBS, SPEEDS, LIMITS = "jobs", "speeds", "limits"
_LOCK_WAIT_S = 1.0
_INSTEAD = f"or set {VARIABLE} to a folder of your own"


def state_folder(name: str = JOBS) -> Path:
    """Return the folder of all records, or the one of another name beside it, which need not exist.

    Errors: LaunchError if the variable or the home folder cannot be used
    """
    given = os.environ.get(VARIABLE)
    if given:
        if not os.path.isabs(given):
            raise LaunchError(f"{VARIABLE}={given}: it must begin with /; give a whole path")
        return Path(given) / "dslaunch" / name
    home = os.environ.get("HOME") or ""
    if not os.path.isabs(home):
        raise LaunchError(
            f"the records of jobs have no place: HOME is {home or 'not set'}; set it, {_INSTEAD}"
        )
    return Path(home) / ".local" / "state" / "dslaunch" / name


def readable_folder(name: str = JOBS) -> Path | None:
    """Return the folder of all records, or the one of another name; None if there is none yet.

    Errors: LaunchError if it is not ours alone
    """
    folder = state_folder(name)
    for one in (folder.parent, folder):
        try:
            found = os.stat(one)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise LaunchError(f"{one}: {error.strerror}; make it readable, {_INSTEAD}") from None
        _refuse_foreign(one, found)
    return folder


def writable_folder(name: str = JOBS) -> Path:
    """Return the folder of all records, or the one of another name, made if it is missing.

    Errors: LaunchError if it is not ours alone, or cannot be made
    """
    folder = state_folder(name)
    top = folder.parent.parent
    try:
        if not os.environ.get(VARIABLE):
            _refuse_foreign_home(Path(os.environ["HOME"]))
        os.makedirs(top, mode=0o700, exist_ok=True)
        _refuse_open_parents(top)
        for one in (folder.parent, folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(one, 0o700)
            _refuse_foreign(one, os.stat(one))
        if not os.access(folder, os.W_OK):
            raise LaunchError(f"{folder}: nothing can be written there; make it writable, {_INSTEAD}")
    except OSError as error:
        path = error.filename or folder
        raise LaunchError(
            f"{path}: the records of jobs have no place there: {error.strerror}; make it writable, {_INSTEAD}"
        ) from None
    return folder


def _refuse_foreign_home(home: Path) -> None:
    """Refuse to act as root with the HOME of another user: our files there would be in that user's way."""
    owner = os.stat(home).st_uid
    if owner != os.getuid() and os.getuid() == 0:
        raise LaunchError(
            f"HOME={home} belongs to the user with id {owner}, not to root; set HOME, {_INSTEAD}"
        )


def _refuse_open_parents(folder: Path) -> None:
    """Refuse a folder where others may rename our files: our folder may become theirs. In a sticky one, as
    /tmp is, they may not.
    """
    real = folder.resolve()
    for one in (real, *real.parents):
        mode = os.stat(one).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise LaunchError(
                f"{one} may be written to by every user (mode {stat.S_IMODE(mode):o}), who could replace the "
                f"records of your jobs; write: chmod o-w {one}, {_INSTEAD}"
            )


def _refuse_foreign(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise LaunchError(f"{path} is no folder; move it away, {_INSTEAD}")
    if found.st_uid != os.getuid():
        raise LaunchError(
            f"{path} belongs to the user with id {found.st_uid}, and you have id {os.getuid()}; it must be "
            f"yours: set HOME to your own folder, {_INSTEAD}"
        )
    if found.st_mode & 0o077:
        raise LaunchError(
            f"{path} is open to other users (mode {stat.S_IMODE(found.st_mode):o}), and jobs are private; "
            f"write: chmod 700 {path}"
        )


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let no other dslaunch choose a name meanwhile; one that stands still is not waited for."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    deadline = time.monotonic() + _LOCK_WAIT_S
    try:
        while not _is_locked(fd) and time.monotonic() < deadline:
            time.sleep(0.002)
        yield
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nothing to wait for
        return True
    return True

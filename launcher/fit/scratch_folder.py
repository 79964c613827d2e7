"""Temporary folders of plans and trials. A process that is killed leaves its own, and the next one that makes
such a folder removes it.

The process that makes a folder locks it, puts MARK into it then, and holds the lock. So the process of a
folder of this user with MARK, but without a lock, is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

MARK = "held"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


@contextlib.contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Yield a temporary folder, which is removed at the end.

    Folders of the same purpose whose process is gone are removed first.
    """
    prefix = f"dslaunch-{purpose}-"
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                _remove_if_left(entry.path)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        fd = os.open(name, _FLAGS)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                Path(name, MARK).touch()
            yield Path(name)
        finally:
            os.close(fd)


def _remove_if_left(path: str) -> None:
    """Remove the folder if this user's process that has made it is gone."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError:
        return
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        os.stat(MARK, dir_fd=fd, follow_symlinks=False)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:  # it has no mark, or its process holds it
        return
    finally:
        os.close(fd)

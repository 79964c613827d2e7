"""Files in places where others may write: opened without following a link and without waiting for a pipe's
other end.
"""

from __future__ import annotations

import errno
import os
import stat

_NEVER = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_plain(path: str, flags: int, mode: int = 0o600) -> int:
    """Return a descriptor of the regular file `path`.

    Errors: OSError whose `strerror` is a clause that follows the path; also for a link, a pipe,
            a socket or a device
    """
    try:
        fd = os.open(path, flags | _NEVER, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a symbolic link", path) from None
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "it is no regular file", path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return fd


def refuse_foreign(found: os.stat_result, path: str) -> None:
    """Refuse to write to a file of another user, who could read and change it. Its owner may be root, or the
    owner of its folder, who could do that anyhow.

    Errors: OSError whose `strerror` is a clause that follows the path
    """
    owner = found.st_uid
    if owner in (0, os.geteuid()):
        return
    folder = os.stat(os.path.dirname(path) or ".")
    if folder.st_uid != owner or folder.st_mode & stat.S_IWOTH:
        raise OSError(errno.EPERM, f"it belongs to the user with number {owner}; give another name", path)


def read_plain(path: str, *, max_bytes: int, start: int = 0) -> bytes:
    """Return the content of the regular file from `start` on, at most `max_bytes`. Errors: those of
    open_plain()
    """
    fd = open_plain(path, os.O_RDONLY)
    try:
        return os.pread(fd, max_bytes, start)
    finally:
        os.close(fd)


def mode_in(folder: str) -> int:
    """Return the mode of a file that we write there: for this user only, unless the folder was made for
    others too.

    It was if it has a default ACL, which decides then, or if its group may write to it or is handed on
    (setgid). A folder where all may write, and remove their own files only, was made for no group: /tmp and
    its like.
    """
    try:
        os.getxattr(folder, "system.posix_acl_default")
        return 0o666
    except OSError:  # no ACL, or a file system without ACLs
        pass
    try:
        mode = os.stat(folder).st_mode
        is_like_tmp = bool(mode & stat.S_ISVTX and mode & stat.S_IWOTH)
        is_shared = bool(mode & stat.S_ISGID) or (bool(mode & stat.S_IWGRP) and not is_like_tmp)
    except OSError:
        return 0o600
    return 0o640 if is_shared else 0o600

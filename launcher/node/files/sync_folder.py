"""A folder that is written to without ever leaving it.

Every name is looked up one folder after the other, and no link is followed on the way: files that the host's
own links point to are never touched, whatever the list of files says.
"""

from __future__ import annotations

import errno
import os
import stat

from ...wire.manifest import FILE, FOLDER, LINK, new_digest
from ..system.lean_stdlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 1 << 20
MAX_OPEN = 32
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder:
    """Names below one folder. The last used folders stay open."""

    def __init__(self, root: bytes, fd: int) -> None:
        """`fd` is an open descriptor of it, which `close` closes."""
        self.root = root
        self.beat: Callable[[], None] = lambda: None  # called during work that may take long
        self.fd = fd
        self._open: dict[bytes, int] = {}

    def at(self, path: bytes) -> tuple[bytes, int]:
        """Return the last name of a path, and its folder; the folder's number is good until the next call.

        Errors: OSError, ENOTDIR or ELOOP if a part of the path is no folder
        """
        self.beat()
        parent, _, name = path.rpartition(b"/")
        if not parent:
            return name, self.fd
        fd = self._open.get(parent)
        if fd is None:
            if len(self._open) >= MAX_OPEN:
                self.forget()
            fd = self._open[parent] = self._open_below(parent)
        return name, fd

    def _open_below(self, path: bytes) -> int:
        fd = os.dup(self.fd)
        for name in path.split(b"/"):
            try:
                inner = os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fd)
            finally:
                os.close(fd)
            fd = inner
        return fd

    def forget(self) -> None:
        """Close the open folders, because folders have changed."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def close(self) -> None:
        self.forget()
        os.close(self.fd)

    def stat(self, path: bytes) -> os.stat_result | None:
        """Status of the name itself; None if it is not there, or a part of the path is no folder."""
        try:
            name, fd = self.at(path)
            return os.stat(name, dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise

    def open(self, path: bytes, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
        name, fd = self.at(path)
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode, dir_fd=fd)

    def link_target(self, path: bytes) -> bytes:
        name, fd = self.at(path)
        return os.readlink(name, dir_fd=fd)

    def digest(self, path: bytes) -> bytes:
        """Digest of a file's content.

        Errors: OSError
        """
        fd = self.open(path)
        try:
            return digest_of(fd, self.beat)
        finally:
            os.close(fd)

    def make_folder(self, path: bytes, mode: int) -> None:
        name, fd = self.at(path)
        os.mkdir(name, mode, dir_fd=fd)

    def set_mode(self, path: bytes, mode: int) -> None:
        """Set the mode of a file or folder, not of a link's target."""
        fd = self.open(path, os.O_PATH)
        try:
            os.chmod(f"/proc/self/fd/{fd}", mode)
        finally:
            os.close(fd)

    def remove(self, path: bytes) -> None:
        """Remove a file or a link, or an empty folder, if it is there."""
        found = self.stat(path)
        if found is None:
            return
        name, fd = self.at(path)
        if stat.S_ISDIR(found.st_mode):
            os.rmdir(name, dir_fd=fd)
            self.forget()
        else:
            os.unlink(name, dir_fd=fd)

    def list(self, path: bytes) -> list[bytes]:
        fd = self.open(path, os.O_DIRECTORY)
        try:
            return [os.fsencode(name) for name in os.listdir(fd)]
        finally:
            os.close(fd)


def kind_of(found: os.stat_result) -> str:
    """Return FILE, FOLDER or LINK, else an empty text."""
    mode = found.st_mode
    if stat.S_ISREG(mode):
        return FILE
    return FOLDER if stat.S_ISDIR(mode) else LINK if stat.S_ISLNK(mode) else ""


def digest_of(fd: int, beat: Callable[[], None] = lambda: None) -> bytes:
    """Digest of the whole content of an open file. Errors: OSError"""
    digest = new_digest()
    while True:
        beat()
        data = os.read(fd, READ_BYTES)
        if not data:
            return digest.digest()
        digest.update(data)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes. Errors: OSError, also if nothing is written"""
    view = memoryview(data)
    while view:
        num_bytes = os.write(fd, view)
        if not num_bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view = view[num_bytes:]


def write_whole(folder: Folder, path: bytes, data: bytes) -> None:
    """Write a file that is either the old or the new one, whatever happens. Errors: OSError"""
    new = path + b".new"
    fd = folder.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(fd, data)
        os.fsync(fd)
    except OSError:
        with suppress(OSError):
            folder.remove(new)
        raise
    finally:
        os.close(fd)
    name, parent = folder.at(path)
    os.rename(name + b".new", name, src_dir_fd=parent, dst_dir_fd=parent)

"""A folder of one agent for files that its workers write."""

from __future__ import annotations

import os

from .lean_stdlib import suppress

KEPT = "kept-"  # begins the names of files that outlive an attempt of the job
_BOOT = "/proc/sys/kernel/random/boot_id"


class PrivateFolder:
    """A temporary folder that only this user can enter.

    The keeper makes it, so that it outlives a killed agent.

    Where no folder can be made (a full or read-only disk) the job runs without it. The workers know the
    folder and may leave any file there, so the names of outside files to remove are not in it: they go
    through a pipe to the keeper.
    """

    def __init__(self) -> None:
        self._path: str | None = None
        self._lock = (
            -1
        )  # held while a process of the job lives that was forked, without exec, from the keeper
        self._outside: list[bytes] = []
        self._told, self._tell = os.pipe()  # from the agent, which the keeper forks; empty: all of it is gone
        for fd in (self._told, self._tell):
            os.set_blocking(fd, False)
        for parent in (*map(os.environ.get, ("TMPDIR", "TEMP", "TMP")), "/tmp", "/var/tmp"):
            if parent and self._path is None:
                self._path, self._lock = _make_folder(parent)

    def file(self, name: str) -> str | None:
        """Return the path of a file in it that does not exist now; None if there can be none."""
        if self._path is None:
            return None
        path = os.path.join(self._path, name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError:  # the name of a folder
            return None
        return path

    def add_outside(self, path: str) -> None:
        """Note a file of ours elsewhere, which is removed together with the folder."""
        self._note(b"%d %d %s" % (*_identity_of(path), os.fsencode(path)))

    def clear(self) -> None:
        """Empty it for another attempt of the job, but for what outlives one, and remove the files elsewhere.
        Make it again if it is gone: what cleans /tmp may have removed it in the days of a job.
        """
        self.remove_outside()
        if self._path is None:
            return
        try:
            names = os.listdir(self._path)
        except FileNotFoundError:
            names = []
            try:
                os.mkdir(self._path, 0o700)
                self._lock = _lock(self._path)
            except OSError:
                self._path = None
        for name in names:
            if not name.startswith(KEPT):
                path = os.path.join(self._path or "", name)
                try:
                    os.unlink(path)
                except OSError:  # a folder
                    _remove_folder(path)

    def remove(self) -> None:
        """Remove the folder with all that is in it; a second call does nothing."""
        self.remove_outside()
        if self._path is not None:
            _remove_folder(self._path)

    def remove_abandoned(self) -> None:
        """Remove the folders beside it whose agent and keeper were killed together: no process holds their
        locks. Those of another boot are not looked at, since that may be another host with the same disk.
        """
        if self._path is None:
            return
        parent, own = os.path.split(self._path)
        begin = own.rpartition("-")[0] + "-"
        with suppress(OSError):
            for name in os.listdir(parent):
                path = os.path.join(parent, name)
                if name != own and name.startswith(begin) and (lock := _lock(path)) >= 0:
                    _remove_folder(path)
                    os.close(lock)

    @property
    def path(self) -> str | None:
        """Path of the folder; None if there can be none."""
        return self._path

    def remove_outside(self) -> None:
        """Remove the files that are elsewhere."""
        if not self._outside:
            self._hear()
        for one in self._outside:
            device, inode, path = one.split(b" ", 2)
            with suppress(OSError):
                if _identity_of(path) == (int(device), int(inode)):  # and not another file of that name
                    os.unlink(path)
        self._outside.clear()
        self._note(b"")

    def _note(self, one: bytes) -> None:
        with suppress(OSError):  # the pipe is full: then only this process knows
            os.write(self._tell, one + b"\0")
        if one:
            self._outside.append(one)

    def _hear(self) -> None:
        """Read the notes of another process, the agent that was killed."""
        with suppress(BlockingIOError):
            for one in os.read(self._told, 1 << 16).split(b"\0")[:-1]:
                self._outside = [*self._outside, one] if one else []


def _identity_of(path: str | bytes) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _make_folder(parent: str) -> tuple[str | None, int]:
    """Make a folder as tempfile.mkdtemp would; to import that takes every host of a job 3 ms. It is locked
    before it has the name under which others look for abandoned ones.
    """
    boot, random = "", os.urandom(8).hex()
    with suppress(OSError), open(_BOOT) as file:
        boot = file.read(8)
    new, path = (
        os.path.join(os.path.abspath(parent), f"dslaunch-{one}-{random}") for one in ("new", f"node-{boot}")
    )
    try:
        os.mkdir(new, 0o700)
        lock = _lock(new)
        os.rename(new, path)
    except OSError:
        return None, -1
    return path, lock


def _lock(path: str) -> int:
    """Return a descriptor that locks the folder; -1 if another process has the lock, or there can be none."""
    import fcntl  # the keeper needs it once

    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if fd >= 0:
            os.close(fd)
        return -1
    return fd


def _remove_folder(path: str) -> None:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError:
        import shutil

        shutil.rmtree(path, ignore_errors=True)

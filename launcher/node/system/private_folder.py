"""A folder of one agent for files that its workers write."""

from __future__ import annotations

import os

from .lean_stdlib import suppress


class PrivateFolder:
    """A temporary folder that only this user can enter.

    The keeper makes it, so that it outlives a killed agent.

    Where no folder can be made (a full or read-only disk) the job runs without it. The workers know the
    folder and may leave any file there, so the names of outside files to remove are not in it: they go
    through a pipe to the keeper.
    """

    def __init__(self) -> None:
        self._path: str | None = None
        self._outside: list[bytes] = []
        self._told, self._tell = os.pipe()  # from the agent, which the keeper forks; empty: all of it is gone
        for fd in (self._told, self._tell):
            os.set_blocking(fd, False)
        for parent in (*map(os.environ.get, ("TMPDIR", "TEMP", "TMP")), "/tmp", "/var/tmp"):
            if parent and self._path is None:
                self._path = _make_folder(parent)

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

    def remove(self) -> None:
        """Remove the folder with all that is in it; a second call does nothing."""
        self.remove_outside()
        if self._path is not None:
            _remove_folder(self._path)

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


def _make_folder(parent: str) -> str | None:
    """Make a folder as tempfile.mkdtemp would; to import that takes every host of a job 3 ms."""
    path = os.path.join(os.path.abspath(parent), f"dslaunch-{os.urandom(8).hex()}")
    try:
        os.mkdir(path, 0o700)
    except OSError:
        return None
    return path


def _remove_folder(path: str) -> None:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError:
        import shutil

        shutil.rmtree(path, ignore_errors=True)

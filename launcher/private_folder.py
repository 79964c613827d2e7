"""A folder of one agent for files that its workers write. Sent to the nodes: standard library only."""

from __future__ import annotations

import os

from .lean import suppress


class PrivateFolder:
    """A temporary folder that only this user can enter. The keeper makes it, so that it outlives a killed agent.

    Where no folder can be made (a full or read-only disk) the job runs without it.
    """

    def __init__(self) -> None:
        self._path: str | None = None
        self._outside: list[str] = []
        for parent in (*map(os.environ.get, ("TMPDIR", "TEMP", "TMP")), "/tmp", "/var/tmp"):
            if parent and self._path is None:
                self._path = _make_folder(parent)

    def file(self, name: str) -> str | None:
        """The path of a file in it that does not exist now."""
        if self._path is None:
            return None
        path = os.path.join(self._path, name)
        if os.path.exists(path):
            os.unlink(path)
        return path

    def add_outside(self, path: str) -> None:
        """A file elsewhere that is to be removed together with the folder, by whoever does that."""
        self._outside.append(path)
        if self._path is not None:
            with suppress(OSError):
                os.symlink(path, os.path.join(self._path, f"outside-{len(self._outside)}"))

    def remove(self) -> None:
        """Remove it with all that is in it; nothing happens the second time."""
        for path in {*self._outside, *self._links()}:
            with suppress(OSError):
                os.unlink(path)
        self._outside.clear()
        if self._path is not None:
            _remove_folder(self._path)

    def _links(self) -> list[str]:
        """What another process added, the agent that was killed."""
        try:
            with os.scandir(self._path or "/nonexistent") as entries:
                return [os.readlink(entry.path) for entry in entries if entry.is_symlink()]
        except OSError:
            return []


def _make_folder(parent: str) -> str | None:
    """As tempfile.mkdtemp would; to import that takes every host of a job 3 ms."""
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
        import shutil  # here: it takes 2 ms, and most folders are empty

        shutil.rmtree(path, ignore_errors=True)

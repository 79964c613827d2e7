"""Checkpoints in a folder of a file system."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from .store import MANIFEST, PARTIAL, REMOVED, REPLACED, Store, hidden, tag_of
from .stream import DirectStream, Stream, naming


class FolderStore(Store):
    """On a file system that all ranks see."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root
        self._claim: int | None = None  # file descriptor of what is written here

    def tags(self) -> list[str]:
        found = [(path.stat().st_mtime_ns, path.parent.name) for path in self.root.glob(f"*/{MANIFEST}")]
        hidden = self.root.glob(f".*{REPLACED}/{MANIFEST}")
        lost = [(path.stat().st_mtime_ns, tag_of(path.parent.name, REPLACED)) for path in hidden]
        found += [(when, tag) for when, tag in lost if not (self.root / tag / MANIFEST).exists()]
        return [tag for _, tag in sorted(found) if not tag.startswith(".")]

    def partial_tags(self) -> list[str]:
        found = (path.name for path in self.root.glob(f".*{PARTIAL}") if path.is_dir())
        return sorted(tag_of(name, PARTIAL) for name in found)

    def folder_of(self, tag: str) -> str:
        # Between the two renames of `publish` the old one has no other name.
        replaced = self.root / hidden(tag, REPLACED)
        return replaced.name if replaced.is_dir() and not (self.root / tag).is_dir() else tag

    def partial_of(self, tag: str) -> str:
        return hidden(tag, PARTIAL)

    def begin(self, tag: str) -> None:
        partial = self.root / self.partial_of(tag)
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        self._claim = _claimed(partial)

    def _sweep(self) -> None:
        """Remove what saves that were killed have left."""
        for path in self.root.glob(".*"):
            if path.name.endswith(REMOVED):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith(REPLACED):
                if (self.root / tag_of(path.name, REPLACED) / MANIFEST).exists():
                    shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith(PARTIAL) and path.is_dir():
                claim = _claimed(path)
                if claim is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(claim)

    def publish(self, folder: str, tag: str) -> None:
        final, replaced = self.root / tag, self.root / hidden(tag, REPLACED)
        _sync(self.root / folder)
        if final.exists():
            if replaced.exists():
                shutil.rmtree(replaced)
            final.rename(replaced)
        (self.root / folder).rename(final)
        _sync(self.root)
        if replaced.exists():
            shutil.rmtree(replaced)
        self._let_go()

    def abandon(self, tag: str) -> None:
        shutil.rmtree(self.root / self.partial_of(tag), ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            os.close(claim)

    def stream(self, name: str, *, capacity: int) -> AbstractContextManager[Stream]:
        return DirectStream(self.root / name, capacity=capacity)

    def put(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}{PARTIAL}")
        with naming(path):
            try:
                with partial.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            _sync(path.parent)

    def open(self, name: str) -> IO[bytes]:
        return (self.root / name).open("rb", buffering=0)

    def size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def files(self, folder: str) -> list[str]:
        path = self.root / folder
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def remove(self, tag: str) -> None:
        doomed = self.root / hidden(tag, REMOVED)
        for folder in (self.root / tag, self.root / hidden(tag, REPLACED)):
            if doomed.exists():
                shutil.rmtree(doomed)
            if folder.exists():
                folder.rename(doomed)  # at once: half of a checkpoint is none
                shutil.rmtree(doomed)

    def partial_file(self, name: str) -> str:
        path = (self.root / name).with_name(hidden(Path(name).name, PARTIAL))
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(path.relative_to(self.root))

    def publish_file(self, name: str) -> None:
        path = self.root / name
        path.with_name(hidden(path.name, PARTIAL)).replace(path)
        _sync(path.parent)

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)


def _claimed(folder: Path) -> int | None:
    """Lock a folder until the descriptor that this returns is closed, or the process ends; None if that cannot be."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or the file system has no locks
        os.close(descriptor)
        return None
    return descriptor


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoints in a folder of a file system."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import IO

from .regular_file import open_regular
from .store import LATEST, MANIFEST, PARTIAL, REMOVED, REPLACED, Store, hidden, tag_of
from .stream import ByteStream, DirectStream, naming

_OUTPUT = "export-"
_MARK = ".begun-"  # start of a file's name, before a random number: by it ranks see that they have one folder
_REPLACED_FILES = "replaced"


class FolderStore(Store):
    """Store on a file system that all ranks see."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root
        self._claim: int | None = None  # file descriptor of the folder that is written

    def tags(self) -> list[str]:
        dated = [(path.stat().st_mtime_ns, path.parent.name) for path in self.root.glob(f"*/{MANIFEST}")]
        hidden = self.root.glob(f".*{REPLACED}/{MANIFEST}")
        lost = [(path.stat().st_mtime_ns, tag_of(path.parent.name, REPLACED)) for path in hidden]
        dated += [(when, tag) for when, tag in lost if not (self.root / tag / MANIFEST).exists()]
        return [tag for _, tag in sorted(dated) if not tag.startswith(".")]

    def partial_tags(self) -> list[str]:
        names = (path.name for path in self.root.glob(f".*{PARTIAL}") if path.is_dir())
        return sorted(tag_of(name, PARTIAL) for name in names if not name.startswith(f".{_OUTPUT}"))

    def folder_of(self, tag: str) -> str:
        # The old one has no other name between the two renames of `publish`.
        replaced = self.root / hidden(tag, REPLACED)
        return replaced.name if replaced.is_dir() and not (self.root / tag).is_dir() else tag

    def partial_of(self, tag: str) -> str:
        return hidden(tag, PARTIAL)

    def begin(self, tag: str) -> str:
        partial = self.root / self.partial_of(tag)
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()
        if partial.exists():
            shutil.rmtree(partial)
        self._own(partial)
        mark = f"{_MARK}{secrets.token_hex(4)}"
        (partial / mark).touch()
        return mark

    def sees(self, tag: str, mark: str) -> bool:
        # mkdir asks the server of an NFS, where a host may still believe that a folder is not there
        folders: list[Path] = []
        for folder in (self.root, self.root / self.partial_of(tag)):
            try:
                folder.mkdir()
                folders.append(folder)
            except FileExistsError:
                pass
            except OSError:
                break
        is_seen = not folders and (self.root / self.partial_of(tag) / mark).exists()
        for folder in reversed(folders):
            with suppress(OSError):  # another rank of this host has looked as well
                folder.rmdir()
        if not is_seen and self.root.is_dir():
            self._sweep()
        return is_seen

    def _own(self, folder: Path) -> None:
        """Make a folder that no sweep removes."""
        folder.mkdir()
        self._claim = _claimed(folder)
        if not folder.exists():  # a sweep came to it between the two lines
            self._let_go()
            self._own(folder)

    def _sweep(self) -> None:
        """Remove the remains of killed saves."""
        for path in self.root.glob(".*"):
            if path.name.endswith(REMOVED) or (
                path.name.endswith(REPLACED) and (self.root / tag_of(path.name, REPLACED) / MANIFEST).exists()
            ):
                with suppress(OSError):
                    _remove(path)
        self._sweep_partial(f".*{PARTIAL}")

    def _sweep_partial(self, pattern: str) -> None:
        for path in self.root.glob(pattern):
            claim = _claimed(path) if path.is_dir() else None
            if claim is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(claim)

    def publish(self, folder: str, tag: str, *, is_latest: bool) -> None:
        final, replaced = self.root / tag, self.root / hidden(tag, REPLACED)
        for mark in (self.root / folder).glob(f"{_MARK}*"):
            mark.unlink()
        _sync(self.root / folder)
        with ExitStack() as undo:
            if final.exists():
                _remove(replaced)
                final.rename(replaced)
                undo.callback(replaced.rename, final)
            (self.root / folder).rename(final)
            undo.callback(final.rename, self.root / folder)
            _sync(self.root)
            if is_latest:
                self.put(LATEST, tag.encode())
            undo.pop_all()
        with suppress(OSError):  # remains count for nothing, and go with the next save
            _remove(replaced)
        self._let_go()

    def abandon(self, tag: str) -> None:
        shutil.rmtree(self.root / self.partial_of(tag), ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            os.close(claim)

    def stream(self, name: str, *, capacity: int) -> AbstractContextManager[ByteStream]:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
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
            with suppress(
                OSError
            ):  # the checkpoint is there: a power cut may bring back the one before, which is whole, too
                _sync(path.parent)

    def open(self, name: str) -> IO[bytes]:
        return open_regular(self.root / name)

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
            _remove(doomed)
            if os.path.lexists(folder):
                folder.rename(doomed)  # all at once: half of a checkpoint is none
                _remove(doomed)

    def begin_output(self) -> str:
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep_partial(f".{_OUTPUT}*{PARTIAL}")
        folder = self.root / hidden(f"{_OUTPUT}{secrets.token_hex(4)}", PARTIAL)
        self._own(folder)
        return f"{folder.name}/"

    def publish_output(self, prefix: str, names: Sequence[str], stale: Sequence[str]) -> None:
        folder = self.root / prefix
        replaced = folder / _REPLACED_FILES
        replaced.mkdir()
        *others, last = names
        with ExitStack() as undo:

            def move(source: Path, target: Path) -> None:
                target.parent.mkdir(parents=True, exist_ok=True)
                source.rename(target)
                undo.callback(target.rename, source)

            # All old ones go before a new one comes, so that an interruption never leaves some of each.
            for name in (*stale, *others):
                with suppress(FileNotFoundError):
                    move(self.root / name, replaced / name)
            for name in others:
                move(folder / name, self.root / name)
            (self.root / last).parent.mkdir(parents=True, exist_ok=True)
            (folder / last).replace(self.root / last)
            undo.pop_all()
        for parent in {(self.root / name).parent for name in names}:
            with suppress(OSError):  # see `put`
                _sync(parent)
        shutil.rmtree(folder, ignore_errors=True)
        self._let_go()

    def abandon_output(self, prefix: str, names: Sequence[str]) -> None:
        replaced = self.root / prefix / _REPLACED_FILES
        if not any(path.is_file() for path in replaced.rglob("*")):  # files that could not be put back stay
            shutil.rmtree(self.root / prefix, ignore_errors=True)
        self._let_go()

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)


def _claimed(folder: Path) -> int | None:
    """Lock a folder until the descriptor that this returns is closed, or the process ends;
    None if that cannot be.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has it, or the file system has no locks
        os.close(descriptor)
        return None
    return descriptor


def _remove(path: Path) -> None:
    """Remove a folder with what is in it, or a link to one and nothing else;
    it may be missing.
    """
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

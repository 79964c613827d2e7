"""The folder that holds checkpoints: on a file system, or at a URL that fsspec opens (s3://, gs://, memory://, ...).

A checkpoint is there when its manifest is, and whatever ends a save leaves what was there before.

On a file system
----------------
A checkpoint comes into being in `.<tag>.partial` and gets its name when all of it is on the disk. One of the same tag is called
`.<tag>.replaced` for a moment, and counts under its tag while there is no other. What a killed save leaves goes away with the next
one; whoever writes holds a lock (flock) on its folder, so that of a save under way elsewhere stays.

At a URL
--------
There is no rename. A new tag is written in its place, the manifest last. A tag that is there is written as `.<tag>.partial`, which
counts under the tag from when its manifest is there and the old one's is not, and is then copied (by the server, where it can).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..errors import CheckpointError
from .stream import DirectStream, Stream, naming

MANIFEST = "manifest.json"
LATEST = "latest"
_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"


def is_tag(text: str) -> bool:
    """Whether a checkpoint can have this name: one folder, not hidden."""
    return text.isprintable() and bool(text) and "/" not in text and not text.startswith(".")


class Store(ABC):
    """Files by names relative to the folder: `global_step4/manifest.json`."""

    def __init__(self, where: str) -> None:
        self.where = where  # for messages

    @abstractmethod
    def tags(self) -> list[str]:
        """Return the checkpoints that are there, oldest first."""

    @abstractmethod
    def partial_tags(self) -> list[str]:
        """Return the checkpoints that are being written, or whose save was cut off."""

    @abstractmethod
    def folder_of(self, tag: str) -> str:
        """Return the folder of a checkpoint, whether it is there or not."""

    @abstractmethod
    def partial_of(self, tag: str) -> str:
        """Return the folder that a checkpoint is written into."""

    @abstractmethod
    def begin(self, tag: str) -> None:
        """Have that folder, empty. For one rank.

        Errors: OSError
        """

    @abstractmethod
    def publish(self, folder: str, tag: str) -> None:
        """Let what was written into `folder`, the manifest last, be the checkpoint `tag`. For one rank."""

    @abstractmethod
    def abandon(self, tag: str) -> None:
        """Give back the space of a save that failed, when no rank writes any more. For one rank. No error."""

    @abstractmethod
    def stream(self, name: str, *, capacity: int) -> AbstractContextManager[Stream]:
        """Write a new file of at most `capacity` bytes, which is durable at the end of the block."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file, or replace it: whole or not at all."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """Open a file to read."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return its bytes, None if it is not there."""

    @abstractmethod
    def files(self, folder: str) -> list[str]:
        """Return the names of the files in a folder; none if it is not there."""

    @abstractmethod
    def remove(self, tag: str) -> None:
        """Remove a checkpoint; one that is not there is no error."""

    @abstractmethod
    def partial_file(self, name: str) -> str:
        """Return the name to write a file under that is to be there when it is complete; its folder is there then."""

    @abstractmethod
    def publish_file(self, name: str) -> None:
        """Let what was written under `partial_file(name)` be the file."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""

    def get(self, name: str) -> bytes:
        """Return what is in a file."""
        with self.open(name) as file:
            return file.read()

    def latest(self) -> str | None:
        """Return the tag that `latest` names, None without that file."""
        if self.size(LATEST) is None:
            return None
        return self.get(LATEST).decode("utf-8", "replace").strip()


class FolderStore(Store):
    """On a file system that all ranks see."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.root = root
        self._claim: int | None = None  # file descriptor of what is written here

    def tags(self) -> list[str]:
        found = [(path.stat().st_mtime_ns, path.parent.name) for path in self.root.glob(f"*/{MANIFEST}")]
        hidden = self.root.glob(f".*{_REPLACED}/{MANIFEST}")
        lost = [(path.stat().st_mtime_ns, _tag_of(path.parent.name, _REPLACED)) for path in hidden]
        found += [(when, tag) for when, tag in lost if not (self.root / tag / MANIFEST).exists()]
        return [tag for _, tag in sorted(found) if not tag.startswith(".")]

    def partial_tags(self) -> list[str]:
        found = (path.name for path in self.root.glob(f".*{_PARTIAL}") if path.is_dir())
        return sorted(_tag_of(name, _PARTIAL) for name in found)

    def folder_of(self, tag: str) -> str:
        # Between the two renames of `publish` the old one has no other name.
        replaced = self.root / _hidden(tag, _REPLACED)
        return replaced.name if replaced.is_dir() and not (self.root / tag).is_dir() else tag

    def partial_of(self, tag: str) -> str:
        return _hidden(tag, _PARTIAL)

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
            if path.name.endswith(_REMOVED):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith(_REPLACED):
                if (self.root / _tag_of(path.name, _REPLACED) / MANIFEST).exists():
                    shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith(_PARTIAL) and path.is_dir():
                claim = _claimed(path)
                if claim is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(claim)

    def publish(self, folder: str, tag: str) -> None:
        final, replaced = self.root / tag, self.root / _hidden(tag, _REPLACED)
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
        partial = path.with_name(f".{path.name}{_PARTIAL}")
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
        doomed = self.root / _hidden(tag, _REMOVED)
        for folder in (self.root / tag, self.root / _hidden(tag, _REPLACED)):
            if doomed.exists():
                shutil.rmtree(doomed)
            if folder.exists():
                folder.rename(doomed)  # at once: half of a checkpoint is none
                shutil.rmtree(doomed)

    def partial_file(self, name: str) -> str:
        path = (self.root / name).with_name(_hidden(Path(name).name, _PARTIAL))
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(path.relative_to(self.root))

    def publish_file(self, name: str) -> None:
        path = self.root / name
        path.with_name(_hidden(path.name, _PARTIAL)).replace(path)
        _sync(path.parent)

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)


class UrlStore(Store):
    """At a URL, through fsspec."""

    def __init__(self, url: str) -> None:
        super().__init__(url.rstrip("/"))
        self._fs, self._root = fsspec.core.url_to_fs(url)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def tags(self) -> list[str]:
        self._fs.invalidate_cache()
        found: dict[str, str] = {}
        for path in (
            *self._fs.glob(self._path(f"*/{MANIFEST}")),
            *self._fs.glob(self._path(f".*/{MANIFEST}")),
        ):
            info, folder = self._fs.info(path), path.rsplit("/", 2)[-2]
            when = info.get("LastModified") or info.get("created") or info.get("mtime") or info.get("updated")
            tag = _tag_of(folder, _PARTIAL) if folder.startswith(".") else folder
            found[tag] = max(str(when), found.get(tag, ""))
        return sorted(found, key=lambda tag: (found[tag], tag))

    def partial_tags(self) -> list[str]:
        self._fs.invalidate_cache()

        def folders(name: str) -> set[str]:
            paths = [*self._fs.glob(self._path(f"*/{name}")), *self._fs.glob(self._path(f".*/{name}"))]
            return {path.rsplit("/", 2)[-2] for path in paths}

        return sorted({_tag_of(folder, _PARTIAL) for folder in folders("*.distcp") - folders(MANIFEST)})

    def folder_of(self, tag: str) -> str:
        partial = _hidden(tag, _PARTIAL)
        return partial if self._is_there(partial) and not self._is_there(tag) else tag

    def partial_of(self, tag: str) -> str:
        partial = _hidden(tag, _PARTIAL)
        return partial if self._is_there(tag) or self._is_there(partial) else tag

    def _is_there(self, folder: str) -> bool:
        return self.size(f"{folder}/{MANIFEST}") is not None

    def begin(self, tag: str) -> None:
        if self.folder_of(tag) != tag:  # the end of a save that was killed
            self._copy(_hidden(tag, _PARTIAL), tag)
        partial = self.partial_of(tag)
        self._remove(partial)
        self._fs.makedirs(self._path(partial), exist_ok=True)

    def publish(self, folder: str, tag: str) -> None:
        if folder != tag:
            self._copy(folder, tag)

    def _copy(self, folder: str, tag: str) -> None:
        """Let what is in `folder` be in `tag`, and no longer there."""
        self._remove(tag)
        self._fs.makedirs(self._path(tag), exist_ok=True)
        names = [name for name in self.files(folder) if name != MANIFEST]
        for name in (*names, MANIFEST):
            self._fs.cp_file(self._path(f"{folder}/{name}"), self._path(f"{tag}/{name}"))
        self._remove(folder)

    def abandon(self, tag: str) -> None:
        with suppress(OSError):
            partial = _hidden(tag, _PARTIAL)
            self._remove(partial if self._is_there(tag) else tag)

    @contextmanager
    def stream(self, name: str, *, capacity: int) -> Iterator[Stream]:
        with self._fs.open(self._path(name), "wb") as file:
            yield cast("Stream", file)

    def put(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(name), data)

    def open(self, name: str) -> IO[bytes]:
        return cast("IO[bytes]", self._fs.open(self._path(name), "rb"))

    def size(self, name: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            return int(self._fs.info(self._path(name))["size"])
        except FileNotFoundError:
            return None

    def files(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return sorted(path.rsplit("/", 1)[-1] for path in self._fs.ls(self._path(folder), detail=False))
        except FileNotFoundError:
            return []

    def remove(self, tag: str) -> None:
        for folder in (tag, _hidden(tag, _PARTIAL)):
            self._remove(folder)

    def _remove(self, folder: str) -> None:
        if self._is_there(folder):
            self._fs.rm_file(self._path(f"{folder}/{MANIFEST}"))  # first: half of a checkpoint is none
        if self._fs.exists(self._path(folder)):
            self._fs.rm(self._path(folder), recursive=True)

    def partial_file(self, name: str) -> str:
        return name  # an object is there when all of it is

    def publish_file(self, name: str) -> None:
        self._fs.invalidate_cache()

    def delete(self, name: str) -> None:
        if self._fs.exists(self._path(name)):
            self._fs.rm_file(self._path(name))


def open_store(where: str | os.PathLike[str]) -> Store:
    """Return the store at a path or a URL.

    Errors: CheckpointError for a URL that fsspec does not know
    """
    text = os.fspath(where)
    if "://" not in text:
        return FolderStore(Path(text))
    try:
        store: Any = UrlStore(text)
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"{text}: {error}; give a path, or a URL whose fsspec package is installed (s3:// wants s3fs, gs:// gcsfs)"
        ) from error
    if isinstance(store._fs, LocalFileSystem):
        return FolderStore(Path(store._root))
    return cast("Store", store)


def _hidden(tag: str, kind: str) -> str:
    return f".{tag}{kind}"


def _tag_of(folder: str, kind: str) -> str:
    return folder.removeprefix(".").removesuffix(kind)


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

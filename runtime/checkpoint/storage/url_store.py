"""Checkpoints at a URL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ...errors import CheckpointError
from .folder_store import FolderStore
from .store import LATEST, MANIFEST, PARTIAL, Store, hidden, tag_of
from .stream import ByteStream


class UrlStore(Store):
    """At a URL, through fsspec."""

    def __init__(self, url: str) -> None:
        super().__init__(url.rstrip("/"))
        self._fs, self._root = fsspec.core.url_to_fs(url)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def tags(self) -> list[str]:
        self._fs.invalidate_cache()
        dates: dict[str, str] = {}
        for path in (
            *self._fs.glob(self._path(f"*/{MANIFEST}")),
            *self._fs.glob(self._path(f".*/{MANIFEST}")),
        ):
            info, folder = self._fs.info(path), path.rsplit("/", 2)[-2]
            when = info.get("LastModified") or info.get("created") or info.get("mtime") or info.get("updated")
            tag = tag_of(folder, PARTIAL) if folder.startswith(".") else folder
            dates[tag] = max(str(when), dates.get(tag, ""))
        return sorted(dates, key=lambda tag: (dates[tag], tag))

    def partial_tags(self) -> list[str]:
        self._fs.invalidate_cache()

        def folders(name: str) -> set[str]:
            paths = [*self._fs.glob(self._path(f"*/{name}")), *self._fs.glob(self._path(f".*/{name}"))]
            return {path.rsplit("/", 2)[-2] for path in paths}

        return sorted({tag_of(folder, PARTIAL) for folder in folders("*.distcp") - folders(MANIFEST)})

    def folder_of(self, tag: str) -> str:
        partial = hidden(tag, PARTIAL)
        return partial if self._is_there(partial) and not self._is_there(tag) else tag

    def partial_of(self, tag: str) -> str:
        partial = hidden(tag, PARTIAL)
        return partial if self._is_there(tag) or self._is_there(partial) else tag

    def _is_there(self, folder: str) -> bool:
        return self.size(f"{folder}/{MANIFEST}") is not None

    def begin(self, tag: str) -> str:
        if self.folder_of(tag) != tag:  # the end of a save that was killed
            self._copy(hidden(tag, PARTIAL), tag)
        partial = self.partial_of(tag)
        self._remove(partial)
        self._fs.makedirs(self._path(partial), exist_ok=True)
        return ""  # all ranks see the same objects

    def publish(self, folder: str, tag: str, *, is_latest: bool) -> None:
        if folder != tag:
            self._copy(folder, tag)
        if is_latest:
            self.put(LATEST, tag.encode())

    def _copy(self, folder: str, tag: str) -> None:
        """Move the files of `folder` to `tag`."""
        self._remove(tag)
        self._fs.makedirs(self._path(tag), exist_ok=True)
        names = [name for name in self.files(folder) if name != MANIFEST]
        for name in (*names, MANIFEST):
            self._fs.cp_file(self._path(f"{folder}/{name}"), self._path(f"{tag}/{name}"))
        self._remove(folder)

    def abandon(self, tag: str) -> None:
        with suppress(OSError):
            partial = hidden(tag, PARTIAL)
            self._remove(partial if self._is_there(tag) else tag)

    @contextmanager
    def stream(self, name: str, *, capacity: int) -> Iterator[ByteStream]:
        with self._fs.open(self._path(name), "wb") as file:
            yield cast("ByteStream", file)

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
        for folder in (tag, hidden(tag, PARTIAL)):
            self._remove(folder)

    def _remove(self, folder: str) -> None:
        if self._is_there(folder):
            self._fs.rm_file(self._path(f"{folder}/{MANIFEST}"))  # first: half of a checkpoint is none
        if self._fs.exists(self._path(folder)):
            self._fs.rm(self._path(folder), recursive=True)

    def begin_output(self) -> str:
        return ""  # an object is there when all of it is

    def publish_output(self, prefix: str, names: Sequence[str], stale: Sequence[str]) -> None:
        for name in stale:
            self.delete(name)
        self._fs.invalidate_cache()

    def abandon_output(self, prefix: str, names: Sequence[str]) -> None:
        for name in names:
            with suppress(OSError):
                self.delete(name)

    def delete(self, name: str) -> None:
        if self._fs.exists(self._path(name)):
            self._fs.rm_file(self._path(name))


def open_store(where: str | os.PathLike[str]) -> Store:
    """Return the store at a path or a URL.

    Errors: CheckpointError for what is neither, and for a URL that fsspec does not know
    """
    text = os.fspath(where) if isinstance(where, str | os.PathLike) else ""
    if not text:
        raise CheckpointError(
            f"{where!r} names no folder of checkpoints; give a path, or a URL such as s3://bucket/run"
        )
    if "://" not in text:
        return FolderStore(Path(text))
    try:
        store: Any = UrlStore(text)
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"{text}: {error}; give a path, or a URL whose fsspec package is installed (s3:// "
            "wants s3fs, gs:// gcsfs)"
        ) from error
    if isinstance(store._fs, LocalFileSystem):
        return FolderStore(Path(store._root))
    return cast("Store", store)

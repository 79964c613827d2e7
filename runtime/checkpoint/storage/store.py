"""The folder that holds checkpoints: on a file system, or at a URL that fsspec opens (s3://,
gs://, memory://, ...).

A checkpoint is there when its manifest is. An interrupted save leaves the earlier checkpoints as they were.

On a file system
----------------
A checkpoint comes into being in `.<tag>.partial` and gets its name when all of it is on the disk. One of the
same tag is called `.<tag>.replaced` for a moment, and counts under its tag while there is no other. What a
killed save leaves goes away with the next one; a save holds a lock (flock) on its folder, so that of a save
under way elsewhere stays. Files for other programs are written in `.export-<number>.partial` and renamed when
all are there; what they replace waits in the same folder until then.

At a URL
--------
There is no rename. A new tag is written in its place, the manifest last. A tag that is there is written as
`.<tag>.partial`, which counts under the tag from when its manifest is there and the old one's is not, and is
then copied (by the server, where it can).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import IO

from ...errors import CheckpointError, without_credentials
from .stream import ByteStream

MANIFEST = "manifest.json"
LATEST = "latest"
PARTIAL, REPLACED, REMOVED = ".partial", ".replaced", ".removed"


def is_tag(text: str) -> bool:
    """Whether a checkpoint can have this name: one folder, not hidden."""
    return text.isprintable() and bool(text) and "/" not in text and not text.startswith(".")


class Store(ABC):
    """Files by names relative to the folder: `global_step4/manifest.json`."""

    is_for_people = True  # scripts lie beside the checkpoints, for programs without dslaunch

    def __init__(self, where: str) -> None:
        self.place = where
        self.where = without_credentials(where)  # for messages

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
    def begin(self, tag: str) -> str:
        """Make the folder of partial_of(tag), empty; return the mark by which `sees` knows it on other ranks.

        One rank calls this.

        Errors: OSError
        """

    def sees(self, tag: str, mark: str) -> bool:
        """Whether the folder that another rank has begun is there for this one. Nothing is left if not."""
        return True

    def missing(self, folder: str, names: Sequence[str]) -> list[str]:
        """Return which files of other ranks are not in the folder, as this rank sees it."""
        return sorted(set(names) - set(self.files(folder)))

    @abstractmethod
    def publish(self, folder: str, tag: str, *, is_latest: bool) -> None:
        """Let the files in `folder`, the manifest written last, be the checkpoint `tag`,
        and `latest` name it. For one rank.

        Errors: OSError; everything is as before then, where there are renames
        """

    @abstractmethod
    def abandon(self, tag: str) -> None:
        """Give back the space of a save that failed, when no rank writes any more. For one rank. No error."""

    @abstractmethod
    def stream(self, name: str, *, capacity: int) -> AbstractContextManager[ByteStream]:
        """Write a new file of at most `capacity` bytes, which is durable at the end of the block."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file, or replace it: whole or not at all."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """Open a file to read."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the file's size in bytes, None if it is not there."""

    @abstractmethod
    def files(self, folder: str) -> list[str]:
        """Return the names of the files in a folder; none if it is not there."""

    @abstractmethod
    def remove(self, tag: str) -> None:
        """Remove a checkpoint, if it is there."""

    @abstractmethod
    def begin_output(self) -> str:
        """Return a prefix for the names of files that are to be there when all of them are complete; other
        writers have others.

        Errors: OSError
        """

    @abstractmethod
    def publish_output(self, prefix: str, names: Sequence[str], stale: Sequence[str]) -> None:
        """Let the files written under `prefix` be these files, the last one last, and remove `stale` ones.

        Errors: OSError; everything is as before then, where there are renames
        """

    @abstractmethod
    def abandon_output(self, prefix: str, names: Sequence[str]) -> None:
        """Give back the space of files that are not published. No error."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""

    def get(self, name: str) -> bytes:
        """Return the content of a file."""
        with self.open(name) as file:
            return file.read()

    def latest(self) -> str | None:
        """Return the tag that `latest` names, None without that file.

        Errors: CheckpointError if it is no file that can be read
        """
        return self.named_by(LATEST)

    def named_by(self, name: str) -> str | None:
        """Return the tag that this file names, as `latest`."""
        if self.size(name) is None:
            return None
        try:
            return self.get(name).decode("utf-8", "replace").strip()
        except OSError as error:
            raise CheckpointError(
                f"{self.where}/{name}, a file with the name of a checkpoint, cannot be read: "
                f"{error.strerror or error}; move it away, or give a tag: the folder holds "
                f"{', '.join(self.tags()) or 'no checkpoint'}"
            ) from error


def hidden(tag: str, kind: str) -> str:
    return f".{tag}{kind}"


def tag_of(folder: str, kind: str) -> str:
    return folder.removeprefix(".").removesuffix(kind)

"""Checkpoints in the memory of the hosts of a job, which their agents hold: snapshots of a training.

A tag is TRAINING-ATTEMPT-NUMBER-stepN, of which a later one is greater. Each host holds what its own ranks
have written, and copies for another host; a checkpoint is there if the hosts that are left have its manifest
and all of its files.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple, NoReturn, cast

import numpy as np
import numpy.typing as npt

from .agent_memory import AgentMemory, LocalFile, MemoryAddress, RemoteFile, StoredFile, held_elsewhere
from .store import MANIFEST, Store
from .stream import ByteStream

_BLOCK = 512  # unit of st_blocks


class _Place(NamedTuple):
    """A place of a file; `host` None: this host."""

    held: StoredFile
    host: MemoryAddress | None


class MemoryStore(Store):
    """The memory of all hosts, as one rank sees it. `look` shows what there is now."""

    is_for_people = False

    def __init__(self, memory: AgentMemory, training: str) -> None:
        """`training` names one of the trainings of this program."""
        super().__init__("the memory of the hosts")
        self.memory, self.training = memory, training
        self._places: dict[tuple[str, str], list[_Place]] = {}
        self._token = ""
        self._maps = _Maps()
        self.unreachable: dict[str, str] = {}  # hosts that did not answer, each with the reason

    def look(self) -> None:
        """Ask all hosts what they hold.

        Errors: OSError if the own one does not answer
        """
        around = self.memory.surroundings()
        self._token, self._places, self.unreachable = around.token, {}, {}
        self._add(self.memory.held(), None)
        for host in around.hosts:
            if host.name != around.name:
                try:
                    self._add(held_elsewhere(host, around.token), host)
                except OSError as error:
                    self.unreachable[host.name] = error.strerror or str(error)

    def _add(self, files: list[StoredFile], host: MemoryAddress | None) -> None:
        for one in files:
            self._places.setdefault((one.tag, one.name), []).append(_Place(one, host))

    def tags(self) -> list[str]:
        """Return the checkpoints of this training that `look` has seen, oldest first."""
        return [tag for tag in self.tags_of_all() if tag.startswith(f"{self.training}-")]

    def tags_of_all(self) -> list[str]:
        """Return the checkpoints of all trainings of this program, oldest first."""
        tags = {tag for tag, name in self._places if name == MANIFEST}
        return sorted(tags, key=lambda tag: tag.partition("-")[2])

    def partial_tags(self) -> list[str]:
        """Return the snapshots of this training that were cut off, of which something is left."""
        own = {tag for tag, _ in self._places if tag.startswith(f"{self.training}-")}
        return sorted(own - set(self.tags()))

    def folder_of(self, tag: str) -> str:
        """Return the tag."""
        return tag

    def partial_of(self, tag: str) -> str:
        """Return the tag: without a manifest it is no checkpoint."""
        return tag

    def begin(self, tag: str) -> str:
        """Make room on this host; every rank calls this."""
        self.memory.ask(do="begin", tag=tag)
        return ""

    def publish(self, folder: str, tag: str, *, is_latest: bool) -> None:
        """Do nothing more: the manifest is there, and each rank tells its host so by `keep`."""

    def keep(self, tag: str) -> None:
        """Tell this host that the checkpoint is whole, so that older ones may go."""
        self.memory.ask(do="keep", tag=tag)

    def abandon(self, tag: str) -> None:
        """Give back the memory on this host."""
        with suppress(OSError):
            self.memory.ask(do="drop", tag=tag)

    def missing(self, folder: str, names: Sequence[str]) -> list[str]:
        """Return none: each rank has heard from its host that its files are there."""
        return []

    @contextmanager
    def stream(self, name: str, *, capacity: int) -> Iterator[ByteStream]:
        """Write a file into the memory of this host."""
        tag, _, name = name.partition("/")
        descriptor, _ = self.memory.descriptor(do="create", tag=tag, name=name, capacity=capacity)
        try:
            stream = _MemoryStream(descriptor, self._maps.place(descriptor, name, capacity))
            yield stream
        finally:
            os.close(descriptor)
        self.memory.ask(do="finish", tag=tag, name=name, size=stream.tell())

    def put(self, name: str, data: bytes) -> None:
        """Write a small file into the memory of this host."""
        tag, _, name = name.partition("/")
        self.memory.put(tag, name, data)

    def open(self, name: str) -> IO[bytes]:
        """Open a file: that of this host, if it has one."""
        tag, _, name = name.partition("/")
        failure: OSError = FileNotFoundError(f"no host has {tag}/{name}")
        for place in sorted(self._places.get((tag, name), []), key=lambda one: one.host is not None):
            held = place.held
            try:
                if place.host is not None:
                    return cast("IO[bytes]", RemoteFile(place.host, self._token, held))
                ask = {"do": "open", "owner": held.owner, "tag": held.tag, "name": held.name}
                descriptor, answer = self.memory.descriptor(**ask)
                return cast("IO[bytes]", LocalFile(descriptor, int(answer["size"])))
            except OSError as error:
                failure = error
        raise failure

    def get(self, name: str) -> bytes:
        """Return the content of a file."""
        with self.open(name) as file:
            return file.read()

    def size(self, name: str) -> int | None:
        """Return the file's size in bytes, None if no host has it."""
        tag, _, name = name.partition("/")
        places = self._places.get((tag, name))
        return places[0].held.size if places else None

    def files(self, folder: str) -> list[str]:
        """Return the names of a checkpoint's files."""
        return sorted(name for tag, name in self._places if tag == folder)

    def remove(self, tag: str) -> None:
        """Give back the memory of a checkpoint on this host."""
        self.memory.ask(do="drop", tag=tag)

    def latest(self) -> str | None:
        """Return the newest checkpoint."""
        return next(reversed(self.tags()), None)

    def begin_output(self) -> str:
        """Raise: files for other programs have a place on a disk."""
        self._refuse()

    def publish_output(self, prefix: str, names: Sequence[str], stale: Sequence[str]) -> None:
        """Raise, as `begin_output`."""
        self._refuse()

    def abandon_output(self, prefix: str, names: Sequence[str]) -> None:
        """Raise, as `begin_output`."""
        self._refuse()

    def delete(self, name: str) -> None:
        """Raise, as `begin_output`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("memory holds whole checkpoints, and nothing for other programs")


class _Maps:
    """Memory of earlier files, which stays mapped: to fill it again is a mere copy."""

    def __init__(self) -> None:
        self._maps: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}  # by file name and inode

    def place(self, descriptor: int, name: str, capacity: int) -> npt.NDArray[np.uint8] | None:
        """Return the memory of a descriptor, `capacity` bytes at least; None if the kernel has still to find
        most of it, which it does in half of the time when a call writes there.
        """
        state = os.fstat(descriptor)
        if not capacity or state.st_blocks * _BLOCK < capacity // 2:
            return None
        key = name, state.st_ino
        found = self._maps.pop(key, None)
        if found is None or len(found) < capacity:
            found = np.frombuffer(mmap.mmap(descriptor, capacity), dtype=np.uint8)
        for old in [one for one in self._maps if one[0] == name][:-1]:  # there are two generations
            del self._maps[old]
        self._maps[key] = found
        return found


class _MemoryStream:
    """Bytes that go from where they lie into the memory of a file, without a copy between."""

    def __init__(self, descriptor: int, place: npt.NDArray[np.uint8] | None) -> None:
        """Write into `place`; without it, by calls that have the kernel write."""
        self._descriptor, self._place, self._done = descriptor, place, 0

    def write(self, data: bytes | memoryview) -> int:
        """Take all of `data`."""
        source = np.frombuffer(data, dtype=np.uint8)
        if self._place is None:
            done, view = 0, memoryview(cast("Any", source))
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], self._done + done)
        else:  # numpy's copy lets other threads run Python meanwhile, memoryview's does not
            np.copyto(self._place[self._done : self._done + len(source)], source)
        self._done += len(source)
        return len(source)

    def tell(self) -> int:
        """Return how many bytes the stream has taken."""
        return self._done

    def flush(self) -> None:
        """Do nothing: what was written is there."""

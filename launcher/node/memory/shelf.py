"""Files in the memory of this host: snapshots of its own workers, and copies of those of another host.

[Note: generations]
All files of one snapshot, whatever host they come from, have one tag: TRAINING-NUMBER-..., of which a later
one is greater. A host holds two generations of each training: the newest one that is kept, which all hosts
know to be whole, and the one that is being written. When a tag appears, what is neither of the two goes, and
its memory is used again: to get new memory from the kernel takes longer than to fill it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FILES = 100_000  # files of all generations
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.:\[\]-]{0,250}")
_BLOCK = 512  # unit of st_blocks
_LIKE = 2  # memory of at most so many times the size, or its reciprocal, is used again for a file
MAX_IDLE = 2  # generations of each training; memory that is spare for longer fits no file any more
_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 2  # numbers of fcntl(2); Python names them from 3.9 on


class CannotHold(Exception):
    """The request cannot be met; the message says why."""


class HeldFile:
    """Memory with a descriptor, and one file in it, which can be read once it is whole.

    The memory is never made smaller (F_SEAL_SHRINK), so it may be mapped in several processes without fear.
    It stays mapped when it is used again: to fill mapped memory is a mere copy.
    """

    def __init__(self) -> None:
        """Errors: OSError"""
        self.descriptor = os.memfd_create("dslaunch-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK)
        self._length = 0
        self._map: mmap.mmap | None = None
        self.key = ("", "")  # owner and name of the file
        self.capacity = self.size = 0
        self.is_whole = False
        self.spared_in = 0  # the number of generations that had begun when it became spare

    @property
    def allocated_bytes(self) -> int:
        """Memory that it takes now."""
        return os.fstat(self.descriptor).st_blocks * _BLOCK

    def use(self, key: tuple[str, str], capacity: int) -> None:
        """Let it be a new file. Errors: OSError"""
        if capacity > self._length:
            os.ftruncate(self.descriptor, capacity)
            self._length, self._map = capacity, None
        self.key, self.capacity, self.size, self.is_whole = key, capacity, 0, False

    def view(self) -> memoryview:
        """Return the memory of the file. Errors: OSError"""
        if not self.capacity:
            return memoryview(b"")
        if self._map is None:
            self._map = mmap.mmap(self.descriptor, self._length)
        return memoryview(self._map)[: self.size if self.is_whole else self.capacity]

    def close(self) -> None:
        os.close(self.descriptor)


class Shelf:
    """Files by tag, by the host that they come from, and by name. Any thread may call.

    Errors: CannotHold
    """

    def __init__(self, free_bytes: Callable[[], int | None]) -> None:
        """`free_bytes` returns the memory that this host can give now; None: not known."""
        self._free_bytes = free_bytes
        self._lock = threading.Lock()
        self._files: dict[str, dict[tuple[str, str], HeldFile]] = {}  # by tag, then by owner and name
        self._kept: set[str] = set()
        self._newest: dict[str, str] = {}  # the newest tag, by training
        self._spare: list[HeldFile] = []  # memory that can be used again
        self._num_begun = 0  # generations

    def begin(self, tag: str) -> None:
        """Make room for a generation; every worker of a host says this, and the first one counts."""
        with self._lock:
            self._begin(tag)

    def _begin(self, tag: str) -> None:
        training = _training_of(tag)
        newest = self._newest.get(training, "")
        if tag < newest:
            raise CannotHold(f"{tag} is older than {newest}, which has begun")
        if tag == newest:
            return
        self._newest[training] = tag
        self._num_begun += 1
        self._close_spare(before=self._num_begun - MAX_IDLE * len(self._newest))
        kept = max((one for one in self._kept if _training_of(one) == training), default="")
        for one in [one for one in self._files if _training_of(one) == training and one != kept]:
            self._remove(one)
        self._kept = {one for one in self._kept if _training_of(one) != training or one == kept}

    def create(self, owner: str, tag: str, name: str, capacity: int) -> HeldFile:
        """Return a new file of at most `capacity` bytes, whose content is not defined."""
        for text in (owner, name):
            if _NAME.fullmatch(text) is None or text in (".", ".."):
                raise CannotHold(f"{text[:80]!r} is no name of a file here")
        with self._lock:
            self._begin(tag)
            if sum(map(len, self._files.values())) >= MAX_FILES:
                raise CannotHold(f"there are {MAX_FILES} files already")
            before = self._files.setdefault(tag, {}).pop((owner, name), None)
            if before is not None:
                self._put_aside(before)
            held = self._take((owner, name), capacity)
            held.use((owner, name), capacity)
            self._files[tag][owner, name] = held
            return held

    def _take(self, key: tuple[str, str], capacity: int) -> HeldFile:
        """Return memory for a file: that of an earlier one of its name, which its writer has mapped; else
        what is spare of a like size, else new memory.
        """
        sizes = {one: one.allocated_bytes for one in self._spare}
        most = _LIKE * max(capacity, mmap.PAGESIZE)
        fitting = [one for one in self._spare if capacity <= _LIKE * sizes[one] <= _LIKE * most]
        best = max(fitting, key=lambda one: (one.key == key, -abs(sizes[one] - capacity)), default=None)
        has = 0 if best is None else sizes[best]
        if best is not None:
            self._spare.remove(best)
        free = self._free_bytes()
        if free is not None and capacity - has > free - self._promised():
            self._close_spare()
            free = self._free_bytes() or 0
            if capacity - has > free - self._promised():
                if best is not None:
                    self._put_aside(best)
                raise CannotHold(f"no room for {capacity} bytes: {max(0, free - self._promised())} are free")
        return HeldFile() if best is None else best

    def _put_aside(self, held: HeldFile) -> None:
        held.spared_in = self._num_begun
        self._spare.append(held)

    def _close_spare(self, *, before: int | None = None) -> None:
        """Give back spare memory: all of it, or what became spare before that generation."""
        spare, self._spare = self._spare, []
        for one in spare:
            if before is None or one.spared_in < before:
                one.close()
            else:
                self._spare.append(one)

    def _promised(self) -> int:
        """Return the bytes that files under way may still take."""
        return sum(
            max(0, one.capacity - one.allocated_bytes)
            for of_tag in self._files.values()
            for one in of_tag.values()
            if not one.is_whole
        )

    def finish(self, owner: str, tag: str, name: str, size: int) -> None:
        """Let a file be whole: it has `size` bytes."""
        with self._lock:
            held = self._files.get(tag, {}).get((owner, name))
            if held is None or held.is_whole:
                raise CannotHold(f"{tag}/{name} of {owner} is not being written")
            if not 0 <= size <= held.capacity:
                raise CannotHold(f"{tag}/{name} was to have {held.capacity} bytes at most, not {size}")
            held.size, held.is_whole = size, True

    def put(self, owner: str, tag: str, name: str, data: bytes) -> None:
        """Hold a small file."""
        self.create(owner, tag, name, len(data)).view()[:] = data
        self.finish(owner, tag, name, len(data))

    def give_up(self, owner: str, tag: str, name: str) -> None:
        """Give up a file that does not become whole."""
        with self._lock:
            held = self._files.get(tag, {}).get((owner, name))
            if held is not None and not held.is_whole:
                self._put_aside(held)
                del self._files[tag][owner, name]

    def open(self, owner: str, tag: str, name: str) -> tuple[int, int]:
        """Return a descriptor of a whole file, for the caller to close, and its size."""
        with self._lock:
            held = self._whole(owner, tag, name)
            return os.dup(held.descriptor), held.size

    def view(self, owner: str, tag: str, name: str) -> memoryview:
        """Return the bytes of a whole file."""
        with self._lock:
            return self._whole(owner, tag, name).view()

    def _whole(self, owner: str, tag: str, name: str) -> HeldFile:
        held = self._files.get(tag, {}).get((owner, name))
        if held is None or not held.is_whole:
            raise CannotHold(f"{tag}/{name} of {owner} is not here")
        return held

    def keep(self, tag: str) -> None:
        """Note that all hosts know this generation to be whole."""
        with self._lock:
            if tag in self._files:
                self._kept.add(tag)

    def drop(self, tag: str) -> None:
        """Give up a generation."""
        with self._lock:
            self._remove(tag)
            self._kept.discard(tag)

    def _remove(self, tag: str) -> None:
        for one in self._files.pop(tag, {}).values():
            self._put_aside(one)

    def held(self) -> list[tuple[str, str, str, int]]:
        """Return tag, owner, name and size of each whole file."""
        with self._lock:
            return [
                (tag, owner, name, one.size)
                for tag, of_tag in self._files.items()
                for (owner, name), one in of_tag.items()
                if one.is_whole
            ]

    def held_bytes(self) -> int:
        """Return the memory that all files take, those to be used again included."""
        with self._lock:
            files = [one for of_tag in self._files.values() for one in of_tag.values()]
            return sum(one.allocated_bytes for one in files + self._spare)

    def close(self) -> None:
        """Give back all memory."""
        with self._lock:
            for tag in list(self._files):
                self._remove(tag)
            self._close_spare()
            self._kept.clear()


def _training_of(tag: str) -> str:
    if _NAME.fullmatch(tag) is None:
        raise CannotHold(f"{tag[:80]!r} is no tag of a snapshot")
    return tag.partition("-")[0]

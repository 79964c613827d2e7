"""Files written and read past the page cache, by threads of the engine's own, while Python goes on.

A file is preallocated, so a full disk is found when the file is made and not in the middle of training. On
disk it is as long as its contents rounded up to whole pages (4096 bytes, or what the file system asks for).
Nothing is synced: what a program wrote outlives the program, but not a crash of the machine.

Units: bytes everywhere; an array counts as its bytes in memory order.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import cast

from .compiled import _C
from .shard import HostArray

DEFAULT_NUM_THREADS = 8
DEFAULT_BLOCK_BYTES = 1 << 20
MAX_NUM_THREADS = 1024
MIN_BLOCK_BYTES = 4096
MAX_BLOCK_BYTES = 1 << 30

# File systems that keep their files in memory; since Linux 6.6 they take O_DIRECT without acting on it.
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Filled = HostArray | bytearray | memoryview
Written = Filled | bytes


def aligned_empty(nbytes: int) -> HostArray:
    """Return `nbytes` of host memory that direct I/O takes as it is: without a copy on the way.

    It starts on a page, from 2 MiB on a huge one, and exports DLPack and the buffer protocol:
    torch.from_dlpack(it), numpy.from_dlpack(it), memoryview(it). It is freed when nothing refers to it. What
    is in it is not defined.

    Shapes:  [nbytes] uint8
    Errors:  MemoryError; ValueError if `nbytes` is negative
    """
    return cast("HostArray", _C.aligned_empty(nbytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Direct:
    """Direct I/O on one file. `fd` is -1 where it does not work, and `reason` says why."""

    fd: int
    page_bytes: int
    memory_align: int
    reason: str | None


class DiskRequest:
    """One array on its way to or from a file.

    The array is kept alive until it has arrived; leave its contents alone.
    """

    __slots__ = ("__weakref__", "_begin", "_end", "_is_seen", "_is_write", "_native", "_path")

    def __init__(self, native: _C.DiskRequest, path: Path, *, begin: int, end: int, is_write: bool) -> None:
        self._native = native
        self._path = path
        self._begin = begin
        self._end = end
        self._is_write = is_write
        self._is_seen = False  # True once it was waited for: then a failure was raised

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once, or raise."""
        return self._native.done

    def wait(self) -> None:
        """Return when the array has arrived. May be called again, and from several threads.

        Errors:  OSError with the errno, the file, and the byte of it where the transfer stopped; the bytes
                 before and behind may have been moved. KeyboardInterrupt while a disk does not answer.
        """
        failed, offset = self._native.wait()
        self._is_seen = True
        if failed == 0:
            return
        verb = "writing" if self._is_write else "reading"
        what = f"{verb} bytes {self._begin} to {self._end} stopped at byte {offset}"
        if failed < 0:
            raise OSError(errno.EIO, f"the file ends there: {what}", str(self._path))
        raise OSError(failed, f"{os.strerror(failed)}: {what}", str(self._path))


class DiskFile:
    """One file of a `DiskEngine`; made by its `create` and `open`."""

    def __init__(
        self, engine: DiskEngine, pool: _C.DiskPool, native: _C.DiskFile, path: Path, nbytes: int
    ) -> None:
        self.path = path
        self.nbytes = nbytes
        self.why_not_direct: str | None = None
        self._engine = engine  # a file keeps its engine; the engine only knows its files
        self._pool = pool
        self._native: _C.DiskFile | None = native
        self._home = os.getpid()
        self._requests: deque[DiskRequest] = deque()  # requests that are not known to be done

    @property
    def is_direct(self) -> bool:
        """Whether transfers go past the page cache; if not, `why_not_direct` has the reason."""
        return self.why_not_direct is None

    def read(self, array: Filled, offset: int = 0) -> DiskRequest:
        """Start to fill the whole array with the bytes from `offset` on.

        Fastest where `offset`, the array's length and its address are multiples of 4096 (see
        `aligned_empty`); other reads are copied once.

        Shapes:  any, of any dtype; contiguous, writable, in host memory
        Errors:  TypeError, ValueError for what cannot be filled or does not fit in the file; ValueError
                 if the file is closed; RuntimeError in a forked child. Everything later is raised by
                 the request's `wait`.
        """
        return self._submit(array, offset, is_write=False)

    def write(self, array: Written, offset: int = 0) -> DiskRequest:
        """Start to write the whole array to the bytes from `offset` on.

        Fastest as with `read`; a part of a page that is neither at the start of a page nor at the
        end of the contents goes through the page cache. Requests that share no byte may be on their
        way at the same time.

        Errors:  as `read`; the array may be read-only
        """
        return self._submit(array, offset, is_write=True)

    def close(self) -> None:
        """Wait for the requests on their way and give the file back; closing again does nothing.

        Errors:  OSError of the first request that failed and was not waited for
        """
        if self._native is None:
            return
        self._native = None
        requests = [*self._requests] if self._home == os.getpid() else []
        self._requests.clear()
        failed: OSError | None = None
        for request in requests:
            if request._is_seen:
                continue
            try:
                request.wait()
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._native is None else "direct" if self.is_direct else "through the page cache"
        return f"DiskFile({str(self.path)!r}, {self.nbytes} bytes, {state})"

    def _submit(self, array: Written, offset: int, *, is_write: bool) -> DiskRequest:
        if self._native is None:
            raise ValueError(f"{self.path}: the file is closed")
        native = self._pool.submit(self._native, is_write=is_write, array=array, offset=offset)
        request = DiskRequest(native, self.path, begin=offset, end=offset + native.nbytes, is_write=is_write)
        self._forget_done()
        self._requests.append(request)
        return request

    def _forget_done(self) -> None:
        """Let go of arrays that have arrived, the oldest first; a failure that was not seen
        stays for `close`.
        """
        while self._requests and self._requests[0].done:
            oldest = self._requests[0]
            if not oldest._is_seen and oldest._native.has_failed:
                return
            self._requests.popleft()


class DiskEngine:
    """Threads that read and write files with direct I/O.

    Each thread moves one block at a time, so `num_threads` is how many blocks the disk sees at once: what
    DeepSpeed's `aio` section calls queue_depth, times its thread_count. Requests are served in the order in
    which they were made.

    `is_quiet`: no warning where files have to go through the page cache.
    Errors:  ValueError for a number out of range; OSError if the threads cannot be started
    """

    def __init__(
        self,
        *,
        num_threads: int = DEFAULT_NUM_THREADS,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        is_quiet: bool = False,
    ) -> None:
        if not 1 <= num_threads <= MAX_NUM_THREADS:
            raise ValueError(f"num_threads: {num_threads}; must be from 1 to {MAX_NUM_THREADS}")
        if not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES or block_bytes & (block_bytes - 1) != 0:
            raise ValueError(
                f"block_bytes: {block_bytes}; must be a power of two from {MIN_BLOCK_BYTES} "
                f"to {MAX_BLOCK_BYTES}"
            )
        self.num_threads = num_threads
        self.block_bytes = block_bytes
        self._is_quiet = is_quiet
        try:
            self._pool = _C.DiskPool(num_threads=num_threads, block_bytes=block_bytes)
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, f"cannot start {num_threads} threads ({error}); use fewer") from error
        self._files: weakref.WeakSet[DiskFile] = weakref.WeakSet()
        self._warned: set[Path] = set()
        # also at exit: requests on their way still arrive
        self._end = weakref.finalize(self, self._pool.close)

    def create(self, path: str | os.PathLike[str], nbytes: int) -> DiskFile:
        """Make a file of `nbytes`, readable by its owner only, with all of its space taken.

        Errors:  FileExistsError; OSError with the bytes wanted and free if the disk or the quota is full, and
                 no file is left then; ValueError if `nbytes` is negative; RuntimeError in a forked child
        """
        if nbytes < 0:
            raise ValueError(f"nbytes: {nbytes}; must be >= 0")
        self._check_open()
        path = Path(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            page_bytes = _page_bytes(fd)
            padded_bytes = -(-nbytes // page_bytes) * page_bytes
            _take_space(fd, path, padded_bytes)
            return self._adopt(fd, path, nbytes=nbytes, padded_bytes=padded_bytes, flags=os.O_RDWR)
        except BaseException:
            os.unlink(path)
            os.close(fd)
            raise

    def open(
        self, path: str | os.PathLike[str], nbytes: int | None = None, *, is_read_only: bool = False
    ) -> DiskFile:
        """Open a file that is there. `nbytes` is how much of it counts, if not all of it.

        A file made by `create` is longer than its contents; give their `nbytes` again.

        Errors:  FileNotFoundError, PermissionError; ValueError if it is not a regular file, or shorter than
                 `nbytes`; RuntimeError in a forked child
        """
        self._check_open()
        path = Path(path)
        flags = os.O_RDONLY if is_read_only else os.O_RDWR
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe would wait for its other end
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path}: not a regular file")
            if nbytes is None:
                nbytes = status.st_size
            if not 0 <= nbytes <= status.st_size:
                raise ValueError(f"{path}: nbytes {nbytes}, but the file has {status.st_size}")
            return self._adopt(fd, path, nbytes=nbytes, padded_bytes=status.st_size, flags=flags)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Wait for every request on its way, close the files and end the threads; closing again does nothing.

        Errors:  OSError of the first request that failed and was not waited for
        """
        failed: OSError | None = None
        for file in list(self._files):
            try:
                file.close()
            except OSError as error:
                failed = failed or error
        self._end()
        if failed is not None:
            raise failed

    def __enter__(self) -> DiskEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        self._pool.check_home()
        if not self._end.alive:
            raise ValueError("the DiskEngine is closed")

    def _adopt(self, fd: int, path: Path, *, nbytes: int, padded_bytes: int, flags: int) -> DiskFile:
        """Take over `fd`, unless this raises."""
        direct = _open_direct(fd, path, flags)
        if direct.reason is not None:
            self._warn_once(path.parent, direct.reason)
        native = _C.DiskFile(
            buffered_fd=fd,
            direct_fd=direct.fd,
            nbytes=nbytes,
            padded_bytes=padded_bytes,
            page_bytes=direct.page_bytes,
            memory_align=direct.memory_align,
        )
        file = DiskFile(self, self._pool, native, path, nbytes)
        file.why_not_direct = direct.reason
        self._files.add(file)
        return file

    def _warn_once(self, folder: Path, reason: str) -> None:
        if self._is_quiet or folder in self._warned:
            return
        self._warned.add(folder)
        warnings.warn(
            f"{folder}: no direct I/O here ({reason}); files go through the page cache, which is slower and "
            "takes memory: use a folder on a local disk, e.g. with ext4 or xfs",
            RuntimeWarning,
            stacklevel=4,
        )


def file_system(fd: int) -> str:
    """Return the name of the file system that an open file or folder is on: ext4, xfs, nfs,
    ... or 'type 0x...'.
    """
    return _C.file_system(fd)


def _page_bytes(fd: int) -> int:
    aligned = _C.direct_align(fd)
    return max(mmap.PAGESIZE, aligned[1] if aligned is not None else 0)


def _take_space(fd: int, path: Path, nbytes: int) -> None:
    if nbytes == 0:
        return
    stats = os.statvfs(path)
    free = stats.f_bavail * stats.f_frsize
    try:
        # Asked for more than there is, some file systems first take all of it, from all other processes too.
        if stats.f_blocks > 0 and nbytes > stats.f_bfree * stats.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise OSError(
                error.errno, f"{error.strerror}: cannot reserve {nbytes} bytes", str(path)
            ) from None
        words = (
            f"{error.strerror}: {nbytes} bytes are wanted, {free} are free; free some or use another folder"
        )
        raise OSError(error.errno, words, str(path)) from None


def _open_direct(fd: int, path: Path, flags: int) -> _Direct:
    """Open the file once more, past the page cache, and try it."""
    page_bytes = _page_bytes(fd)
    aligned = _C.direct_align(fd)
    memory_align = max(1, aligned[0]) if aligned is not None else page_bytes

    def refused(reason: str) -> _Direct:
        return _Direct(fd=-1, page_bytes=page_bytes, memory_align=1, reason=reason)

    name = _C.file_system(fd)
    if name in MEMORY_FILE_SYSTEMS:
        return refused(f"{name} keeps its files in memory")
    if aligned == (0, 0):
        return refused(f"the file system, {name}, says that it has none")
    try:
        direct_fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return refused(f"the file system, {name}, refuses O_DIRECT: {error.strerror}")
    failed = _C.probe_direct_read(direct_fd, page_bytes=page_bytes, memory_align=memory_align)
    if failed == 0:
        return _Direct(fd=direct_fd, page_bytes=page_bytes, memory_align=memory_align, reason=None)
    os.close(direct_fd)
    if failed in (errno.EINVAL, errno.EOPNOTSUPP):
        return refused(f"the file system, {name}, fails direct reads: {os.strerror(failed)}")
    raise OSError(failed, f"{os.strerror(failed)}: reading its first page", str(path))

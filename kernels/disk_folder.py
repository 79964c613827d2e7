"""A folder for one rank's files below the user's nvme_path, which no crash leaves behind for good.

    <nvme_path>/dslaunch-<job id>/rank<N>        the files
    <nvme_path>/dslaunch-<job id>/rank<N>.lock   locked (flock) while its process lives;
                                                 says which process that is

[Note: who may remove a folder]
The kernel gives a lock back when its process dies, however it dies; so a lock that can be taken means that no
process uses the folder. The lock file is made before the folder and removed after it, and only by who holds
the lock. A process that has taken a lock makes sure that the file still has its name: else it was removed in
between. On a file system that other hosts may share, a lock may be known on its own host only. There the
host's boot id in the lock file must be this one's too. On a local disk it does not count: after a restart of
the host, or from a container that is gone, the lock alone is enough.

A forked child holds its parent's lock as well: the folder counts as used until both are gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
import warnings
import weakref
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .disk import file_system

LOCAL_FILE_SYSTEMS = ("ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay")
JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")
JOB_FOLDER = re.compile(r"dslaunch-[A-Za-z0-9._-]{1,200}")
LOCK_FILE = re.compile(r"(rank[0-9]{1,9})\.lock")
CLEANING_TIME_S = 10.0  # limit for a lock of a process that only removes what a dead one left
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """The process that a lock file names."""

    host: str
    boot_id: str
    pid: int


class DiskFolder:
    """One rank's folder, `path`, empty at first; it goes, with all that is in it,
    at `close` or when the program ends.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._end = weakref.finalize(self, _give_back, path, lock_fd, os.getpid())

    @classmethod
    def claim(cls, nvme_path: str | os.PathLike[str], job_id: str, rank: int) -> DiskFolder:
        """Make the folder of this rank of this job, and remove what dead jobs left in `nvme_path`.

        Errors:  FileNotFoundError, NotADirectoryError, PermissionError about `nvme_path`; FileExistsError if
                 a living process has this job id and rank there, or a host of which nothing is known;
                 ValueError for a job id that is no file name, or a negative rank
        """
        if JOB_ID.fullmatch(job_id) is None:
            raise ValueError(f"job_id: {job_id!r}; must be 1 to 200 of the letters A-Z a-z 0-9 . _ -")
        if rank < 0:
            raise ValueError(f"rank: {rank}; must be >= 0")
        base = _checked(nvme_path)
        clean_stale(base)
        job = base / f"dslaunch-{job_id}"
        lock_fd = _take_lock(job, f"rank{rank}.lock", is_local=_is_local(base))
        path = job / f"rank{rank}"
        try:
            _remove_tree(path)
            os.mkdir(path, 0o700)
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(path, lock_fd)

    def close(self) -> None:
        """Remove the folder and what is in it; in a forked child this does nothing.

        Closing again does nothing.
        """
        self._end()

    def __repr__(self) -> str:
        return f"DiskFolder({str(self.path)!r}{'' if self._end.alive else ', closed'})"


def clean_stale(nvme_path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Remove the folders that dead processes of this user and this host left in `nvme_path`, and return them.

    Folders of living processes, of other users and of other hosts stay.
    What cannot be removed is warned about.

    Errors:  FileNotFoundError, NotADirectoryError, PermissionError about `nvme_path`
    """
    base = _checked(nvme_path)
    is_local = _is_local(base)
    removed = []
    for name in sorted(os.listdir(base)):
        job = base / name
        if JOB_FOLDER.fullmatch(name) is None:
            continue
        try:
            if not _is_own(os.lstat(job)):
                continue
            for lock_name in sorted(os.listdir(job)):
                match = LOCK_FILE.fullmatch(lock_name)
                if match is not None and _clean_rank(job, match[1], is_local=is_local):
                    removed.append(job / match[1])
            _remove_if_empty(job)
        except FileNotFoundError:
            continue  # another process cleans it
        except OSError as error:
            warnings.warn(
                f"{job}: a dead job left it and it cannot be removed ({error})", RuntimeWarning, stacklevel=2
            )
    return tuple(removed)


# ---- locks -----------------------------------------------------------------------------------------------


def _take_lock(job: Path, name: str, *, is_local: bool) -> int:
    """Lock the file, made if needed, and write this process into it. Errors as `DiskFolder.claim`."""
    deadline = time.monotonic() + CLEANING_TIME_S
    while True:
        fd = _open_lock(job, name)
        try:
            is_held = not _lock_now(fd)
            if is_held and time.monotonic() > deadline:
                raise FileExistsError(errno.EEXIST, f"{_used_by(fd)}; use another job id", str(job / name))
            if not is_held and _has_its_name(fd, job / name):
                owner = _read_owner(fd)
                if not _may_remove(owner, is_local=is_local) and os.fstat(fd).st_size > 0:
                    words = f"{_used_by(fd)}, perhaps still alive; remove it there or use another job id"
                    raise FileExistsError(errno.EEXIST, words, str(job / name))
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(asdict(_this_process())).encode(), 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if is_held:
            time.sleep(POLL_S)


def _open_lock(job: Path, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:  # retry while another process removes the job's folder in between
        with contextlib.suppress(FileExistsError):
            os.mkdir(job, 0o700)
        with contextlib.suppress(FileNotFoundError):
            if not _is_own(os.lstat(job)):
                words = "not a folder of this user; use another job id"
                raise PermissionError(errno.EPERM, words, str(job))
            return os.open(job / name, flags, 0o600)


def _clean_rank(job: Path, rank_name: str, *, is_local: bool) -> bool:
    lock = job / f"{rank_name}.lock"
    fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid() or not _lock_now(fd) or not _has_its_name(fd, lock):
            return False
        if not _may_remove(_read_owner(fd), is_local=is_local):
            return False
        _remove_tree(job / rank_name)
        os.unlink(lock)
        return True
    finally:
        os.close(fd)


def _lock_now(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _has_its_name(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _may_remove(owner: _Owner | None, *, is_local: bool) -> bool:
    """Whether a folder whose lock was free may go. See [Note: who may remove a folder]."""
    return is_local or (owner is not None and owner.boot_id != "" and owner.boot_id == _boot_id())


# ---- owners ----------------------------------------------------------------------------------------------


def _this_process() -> _Owner:
    return _Owner(host=socket.gethostname(), boot_id=_boot_id(), pid=os.getpid())


def _read_owner(fd: int) -> _Owner | None:
    try:
        content = json.loads(os.pread(fd, 4096, 0))
        return _Owner(**{field.name: content[field.name] for field in fields(_Owner)})
    except (ValueError, TypeError, KeyError):
        return None  # killed before it wrote, or just made


def _used_by(fd: int) -> str:
    owner = _read_owner(fd)
    if owner is None:
        return "in use by a process that did not leave its name"
    return f"in use by process {owner.pid} on host {owner.host}"


def _boot_id() -> str:
    """Return what tells this run of this host's kernel from all others; empty where that is not to be had."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


# ---- folders ---------------------------------------------------------------------------------------------


def _checked(nvme_path: str | os.PathLike[str]) -> Path:
    path = Path(nvme_path)
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "nvme_path: no such folder; make it first", str(path)) from None
    if not is_folder:
        raise NotADirectoryError(
            errno.ENOTDIR, "nvme_path: not a folder; name one on a local disk", str(path)
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(
            errno.EACCES, "nvme_path: this user may not write there; name another folder", str(path)
        )
    return path


def _is_local(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return file_system(fd) in LOCAL_FILE_SYSTEMS
    finally:
        os.close(fd)


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _remove_tree(path: Path) -> None:
    if os.path.lexists(path):
        shutil.rmtree(path)


def _remove_if_empty(path: Path) -> None:
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _give_back(path: Path, lock_fd: int, home: int) -> None:
    if os.getpid() != home:
        return
    try:
        _remove_tree(path)
        with contextlib.suppress(FileNotFoundError):  # the user was faster
            os.unlink(path.with_name(path.name + ".lock"))
        _remove_if_empty(path.parent)
    finally:
        os.close(lock_fd)

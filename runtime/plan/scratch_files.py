"""A view of the file systems in which a process may write, and nothing of it stays.

A rehearsed program saves checkpoints, removes old ones and writes logs, as in a run. Linux lets a process
have mounts of its own: over each folder lies an overlay, whose changes go to memory that ends with the
process.

Folders with mounts below them cannot be covered as a whole by a user without rights over those mounts, so
their folders are covered one by one; files that lie beside these stay as they are, and can be written.
/dev, /proc and /sys are left as they are.

A user who is not root has one number of a user and one of a group in such a view, and an overlay refuses to
copy what belongs to others: only folders of this user and group are covered, and temporary files get a
folder of their own.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_LEFT = ("/dev", "/proc", "/sys")
_OF_ROOT = ("/bin", "/boot", "/etc", "/lib", "/lib64", "/sbin", "/usr", "/var/lib")
_USER_DEPTH = 4  # folders from the root, below which no folder of the user is looked for
_ESCAPED = re.compile(r"([\\:,])")
_OCTAL = re.compile(r"\\([0-7]{3})")  # a blank in /proc/self/mountinfo


class _Refused(OSError):
    """The kernel does not allow it."""


def enter(layers: str) -> str:
    """Have this process write into memory instead of files, from now on; return an empty text, or why not.

    `layers` is a folder that is not there yet; it stays empty for all other processes, and the caller removes
    it. Files that are open stay as they are. The process must have one thread: torch is not imported yet.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        is_as_user = _separate(libc)
        _call(libc, "mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        return _cover_all(libc, layers, is_as_user=is_as_user)
    except (OSError, AttributeError) as error:
        return str(error)


def _separate(libc: ctypes.CDLL) -> bool:
    """Leave the mounts of other processes; tell whether that took a user namespace."""
    user, group = os.geteuid(), os.getegid()
    if user == 0 and libc.unshare(_CLONE_NEWNS) == 0:
        return False
    _call(libc, "unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def _cover_all(libc: ctypes.CDLL, layers: str, *, is_as_user: bool) -> str:
    """Put overlays over all folders; return which of those that a program writes to are without one."""
    here = os.getcwd()
    mounts = mount_points(Path("/proc/self/mountinfo").read_text())
    folders = list(_own_folders("/", mounts) if is_as_user else folders_to_cover("/", mounts))
    os.mkdir(layers)
    _call(libc, "mount", b"tmpfs", os.fsencode(layers), b"tmpfs", 0, b"mode=0700")
    os.chdir(layers)  # an overlay may hide its path, and it stays at hand so
    failed: list[str] = []
    for number, folder in enumerate(folders):
        upper, work = f"upper{number}", f"work{number}"
        for one in (upper, work):
            os.mkdir(one)
        try:
            status = os.stat(folder)
            os.chmod(upper, status.st_mode & 0o7777)
            options = f"lowerdir={_escaped(folder)},upperdir={upper},workdir={work}"
            options += ",userxattr" if is_as_user else ""
            _call(libc, "mount", b"overlay", os.fsencode(folder), b"overlay", 0, os.fsencode(options))
        except OSError:
            failed.append(folder)
    if is_as_user:
        os.environ["TMPDIR"] = tempfile.mkdtemp(dir=layers)
    os.chdir(here)  # the folder of the view, not the one below it
    covered = [one for one in folders if one not in failed]
    return next((f"no overlay lies over {one}" for one in (here, home_of()) if not _is_in(one, covered)), "")


def home_of() -> str:
    """Return the user's home."""
    return os.path.realpath(os.path.expanduser("~"))


def _is_in(folder: str, covered: Sequence[str]) -> bool:
    return any((folder + "/").startswith(one.rstrip("/") + "/") for one in covered)


def _own_folders(folder: str, mounts: Sequence[str], depth: int = 0) -> Iterator[str]:
    """Yield the folders of this user and group that belong to no such folder themselves."""
    below = [one for one in mounts if one.startswith(folder.rstrip("/") + "/") and one != folder]
    try:
        status = os.stat(folder)
        if (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid()) and not below:
            yield folder
            return
        entries = sorted(os.scandir(folder), key=lambda one: one.name) if depth < _USER_DEPTH else []
    except OSError:
        return
    for entry in entries:
        if entry.path not in (*_LEFT, *_OF_ROOT) and entry.is_dir(follow_symlinks=False):
            yield from _own_folders(entry.path, below, depth + 1)


def mount_points(mountinfo: str) -> tuple[str, ...]:
    """Return where something is mounted, in the order of the mounts."""
    found = (line.split(" ")[4] for line in mountinfo.splitlines() if line)
    return tuple(_OCTAL.sub(lambda match: chr(int(match[1], 8)), one) for one in found)


def folders_to_cover(folder: str, mounts: Sequence[str]) -> Iterator[str]:
    """Yield the folders that together hold the files of all file systems, each without a mount below it."""
    prefix = folder.rstrip("/") + "/"
    below = [one for one in mounts if one.startswith(prefix) and one != folder]
    if not below and folder != "/":
        yield folder
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda one: one.name)
    except OSError:
        return
    for entry in entries:
        if entry.path not in _LEFT and entry.is_dir(follow_symlinks=False):
            yield from folders_to_cover(entry.path, below)


def _escaped(folder: str) -> str:
    return _ESCAPED.sub(r"\\\1", folder)


def _call(libc: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Errors: OSError with the kernel's reason"""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise _Refused(number, f"the kernel refuses {name}: {os.strerror(number)}")

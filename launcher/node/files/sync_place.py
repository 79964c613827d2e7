"""The way to the folder that is filled.

A job runs the files in its folder. So every folder on the way must be one that no other user of the host can
change: another user who may rename or replace a folder decides which files run. Each folder is opened from
the one above it, so that the checked folder is the one that is used.
"""

from __future__ import annotations

import errno
import os
import stat

from ..system.lean_stdlib import suppress

MAX_LINKS = 40
MADE_MODE = 0o755
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Untrusted(Exception):
    """Another user of the host decides what is in a folder; the message says who and where."""


class Trust:
    """Users whose files a job may run: this one, and root. Root is also the owner of `/`: in a user namespace
    that is how the host's root appears.
    """

    def __init__(self) -> None:
        self._uids = {0, os.geteuid(), os.stat("/").st_uid}

    def why_not(self, found: os.stat_result, *, allowed: int = 0, is_sticky_fine: bool = False) -> str:
        """Return a clause if others own this or may write to it, else nothing. `allowed`: a mode that was
        asked for.

        `is_sticky_fine`: it is only passed through, and in a sticky folder users rename only their own files.
        """
        if found.st_uid not in self._uids:
            return f"belongs to {user_name(found.st_uid)}"
        open_to = found.st_mode & _OTHERS_WRITE & ~allowed
        if open_to & stat.S_IWGRP and self._is_private(found.st_gid):
            open_to &= ~stat.S_IWGRP
        if not open_to or (is_sticky_fine and found.st_mode & stat.S_ISVTX):
            return ""
        who = "every user" if open_to & stat.S_IWOTH else f"the group {_group_name(found.st_gid)}"
        return f"may be written to by {who} (mode {stat.S_IMODE(found.st_mode):o})"

    def _is_private(self, gid: int) -> bool:
        """Tell whether the group is that of this user or root alone; many systems give each user one."""
        import grp
        import pwd

        with suppress(KeyError):
            group = grp.getgrgid(gid)
            for uid in self._uids:
                user = pwd.getpwuid(uid)
                if user.pw_gid == gid and user.pw_name == group.gr_name:
                    return set(group.gr_mem) <= {user.pw_name}
        return False


def open_place(path: bytes, trust: Trust) -> int:
    """Return a descriptor of the folder, which is made if it is missing.

    Errors: Untrusted; OSError, with the folder as its filename
    """
    with suppress(OSError):
        os.stat(path)  # mounts a file system that is mounted at its first use
    way = _Way(trust)
    try:
        names, num_links = path.split(b"/"), 0
        while names:
            name = names.pop(0)
            if name in (b"", b"."):
                continue
            target = way.enter(name)
            num_links += target is not None
            if num_links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            names = [*(target or b"").split(b"/"), *names]
        return way.end()
    finally:
        way.close()


class _Way:
    """Folders from `/` on, of which the last one is open. `path` has no links in it."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._begin()

    def _begin(self) -> None:
        self._fd, self.path = os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), b"/"

    def enter(self, name: bytes) -> bytes | None:
        """Go on to the folder of this name. If it is a link, stay; return where it leads from here.

        Errors: Untrusted, OSError
        """
        _check(self._trust, self.path, os.fstat(self._fd), is_sticky_fine=True)
        inner_path = os.path.normpath(os.path.join(self.path, name))
        inner = self._open_or_make(name, inner_path)
        found = os.fstat(inner)
        if not stat.S_ISLNK(found.st_mode):
            self.close()
            self._fd, self.path = inner, inner_path
            return None
        try:
            _check(self._trust, inner_path, found, allowed=_OTHERS_WRITE)  # a link has no mode of its own
            target = os.readlink(b"", dir_fd=inner)
        finally:
            os.close(inner)
        if target.startswith(b"/"):
            self.close()
            self._begin()
        return target

    def _open_or_make(self, name: bytes, path: bytes) -> int:
        try:
            try:
                return os.open(name, _LOOK, dir_fd=self._fd)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    os.mkdir(name, MADE_MODE, dir_fd=self._fd)
                return os.open(name, _LOOK, dir_fd=self._fd)
        except OSError as error:
            error.filename = path
            raise

    def end(self) -> int:
        """Open the last folder for reading. Errors: Untrusted, OSError"""
        _check(self._trust, self.path, os.fstat(self._fd))
        try:
            return os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError as error:
            error.filename = self.path
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _check(
    trust: Trust, path: bytes, found: os.stat_result, *, allowed: int = 0, is_sticky_fine: bool = False
) -> None:
    why = trust.why_not(found, allowed=allowed, is_sticky_fine=is_sticky_fine)
    if why:
        raise Untrusted(
            f"{os.fsdecode(path)} {why}, so others decide what the job runs there; let it be this user's "
            "or root's, and writable for no other (chmod go-w), or give another folder, as with cwd= in the "
            "hostfile"
        )


def user_name(uid: int) -> str:
    """Return the name of a user of this host, or the number."""
    import pwd

    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user of number {uid}"


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)

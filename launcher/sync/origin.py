"""The sender of a folder. A host keeps it with the files sent from there.

A sender is a folder at its path, of a user, on a machine. A folder in a network's file system is the same one
on every machine that has it mounted: there the server's name and the path on it stand for machine and path.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
from typing import NamedTuple

from ..node.system.kernel_file import read_text


class SyncOrigin(NamedTuple):
    """`key` is the same for two syncs only if one sender makes both; `words` are for messages."""

    key: str
    words: str


def origin_of(root: bytes, *, proc: str = "/proc/self") -> SyncOrigin:
    """Return the origin of a folder here."""
    path = os.path.realpath(root)
    machine = os.uname().nodename
    place = _place_on_server(path, os.path.join(proc, "mountinfo"))
    if not place:
        place = b"\0".join((_machine_id().encode(), os.fsencode(machine), path))
    key = hashlib.blake2b(b"%d\0%s" % (os.getuid(), place), digest_size=16).hexdigest()
    return SyncOrigin(key, f"{os.fsdecode(path)} of {_user()} on {machine}")


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"the user of number {os.getuid()}"


def _machine_id() -> str:
    return read_text("/etc/machine-id").strip()


def _place_on_server(path: bytes, mounts: str) -> bytes:
    """Return server and path, if a server keeps the folder; else empty."""
    nearest, place = b"", b""
    for line in read_text(mounts).splitlines():
        before, _, after = line.partition(" - ")
        root, mount = (_unescaped(one) for one in before.split()[3:5])
        source = _unescaped(after.split()[1])
        if (path + b"/").startswith(mount.rstrip(b"/") + b"/") and len(mount) >= len(nearest):
            is_on_server = source.startswith(b"//") or re.match(rb"[^/]+:", source) is not None
            below = os.path.relpath(path, mount)
            nearest, place = mount, os.path.normpath(source + root + b"/" + below) if is_on_server else b""
    return place


def _unescaped(text: str) -> bytes:
    """Return a word of mountinfo, in which blanks are written as numbers."""
    raw = text.encode("utf-8", "surrogateescape")
    return re.sub(rb"\\([0-7]{3})", lambda one: bytes([int(one[1], 8)]), raw)

"""The digests of files that have not changed since they were read last."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from ..inputs.named_file import read_named
from ..wire.manifest import DIGEST_BYTES

VERSION = 1
MAX_BYTES = 256 << 20  # size for a million files
# A file that was changed a moment ago may change again within one tick of the file system's clock: its size
# and times prove nothing then.
SETTLED_AFTER_S = 2.0

Identity = tuple[int, int, int, int]  # size, mtime_ns, ctime_ns, inode


class DigestCache:
    """The digests of one folder, in the user's cache folder. If that cannot be used, all files are read
    again.
    """

    def __init__(self, root: bytes) -> None:
        import hashlib

        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        name = hashlib.blake2b(root, digest_size=16).hexdigest()
        self._path = os.path.join(home, "dslaunch", "sync", f"{name}.json")
        self._known = _read(self._path)
        self._used: dict[bytes, tuple[Identity, bytes]] = {}
        self.num_read = 0  # files that were not known

    def find(self, path: bytes, identity: Identity) -> bytes | None:
        """Return the digest of an unchanged file."""
        known = self._known.get(path)
        if known is None or known[0] != identity:
            return None
        self._used[path] = known
        return known[1]

    def add(self, path: bytes, identity: Identity, digest: bytes, *, read_at: float) -> None:
        """Add a file that was read from `read_at` on."""
        self.num_read += 1
        if identity[1] < (read_at - SETTLED_AFTER_S) * 1e9:
            self._used[path] = identity, digest

    def write(self) -> None:
        """Write the known digests for the next time."""
        if self._used == self._known:
            return
        rows = [
            [os.fsdecode(path), *identity, digest.hex()] for path, (identity, digest) in self._used.items()
        ]
        new = f"{self._path}.{os.getpid()}"
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                json.dump([VERSION, rows], file)
            os.replace(new, self._path)


def _read(path: str) -> dict[bytes, tuple[Identity, bytes]]:
    known: dict[bytes, tuple[Identity, bytes]] = {}
    try:
        version, rows = json.loads(read_named(Path(path), max_bytes=MAX_BYTES))
        for name, size, mtime_ns, ctime_ns, inode, digest in rows if version == VERSION else ():
            one = bytes.fromhex(digest)
            if len(one) == DIGEST_BYTES:
                known[os.fsencode(name)] = (size, mtime_ns, ctime_ns, inode), one
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return known


def now() -> float:
    """Return the time in the unit of files' times."""
    return time.time()

"""Keys of hosts in known_hosts files, judged as OpenSSH does. Each file is read once for a job.

paramiko would read every file again for every connection, and compare each line with all before it: with N
hosts in the file and N connections that is N cubed, and took most of the time of a start on many hosts.
paramiko also supports neither patterns nor markers.

[Note: As OpenSSH decides]
A line counts for a name as OpenSSH's match_hostname() says: patterns, `!`, letters of any case, or one hashed
name. A key in one of these lines is known. If the lines have only other keys, of whatever kinds, it is
changed; if there are no lines for the name, it is unknown. A key in a line of `@revoked` is refused before
all that. A line that OpenSSH cannot read counts for nothing. This module is stricter in two ways: a line
counts also if its key is of a kind that is new to this program, and a marker may be followed by a tab.

Source: OpenSSH 9.2p1 hostfile.c (hostkeys_foreach_file, check_hostkeys_by_key_or_type) and sshconnect.c
(check_host_key)
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import threading
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from ..inputs.named_file import read_named
from .openssh_patterns import fits_list, has_signs

NO_FILE = "none"  # a configuration's word for it
_HASHED = "|1|"  # then salt|HMAC-SHA1 of the name, both in base64
_MAX_NAME = 1023  # letters; OpenSSH passes over a line with a longer one
_UNWRITABLE = frozenset(" \t\r\n,!@?*#[]|'\"\\")  # a name with one of these would mean another host or none


class KeyMarker(Enum):
    """First word of a line: the kind of its key."""

    NONE = ""
    REVOKED = "@revoked"
    AUTHORITY = "@cert-authority"


class Standing(Enum):
    """The verdict of the files on the key that a host shows."""

    KNOWN = auto()
    UNKNOWN = auto()  # the files have no key of this host
    CHANGED = auto()
    REVOKED = auto()


class HostKey(NamedTuple):
    """A public key. `place` is its file and line, for messages."""

    kind: str
    blob: bytes
    place: str = ""

    @property
    def fingerprint(self) -> str:
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")


class KnownKeys(NamedTuple):
    """The keys of some files for one name, in the order of their lines."""

    keys: tuple[HostKey, ...] = ()
    revoked: tuple[HostKey, ...] = ()
    authorities: tuple[HostKey, ...] = ()

    def standing(self, key: HostKey) -> Standing:
        """Judge the key: see [Note: As OpenSSH decides]."""
        if any(one.blob == key.blob for one in self.revoked):
            return Standing.REVOKED
        if any(one.blob == key.blob for one in self.keys):
            return Standing.KNOWN
        return Standing.CHANGED if self.keys else Standing.UNKNOWN


class HostNames(NamedTuple):
    """The names of a host in the files."""

    name: str  # [host]:port where the port is not 22
    # The host without its port, if `name` has one: a key of this name counts as known, too
    portless: str = ""
    address: str = ""  # with CheckHostIP: the files must not have another key for it


class KeyFinding(NamedTuple):
    """`known` are the lines of the name that decided; `unwritten`: why a new key was not written down."""

    standing: Standing
    known: KnownKeys
    unwritten: str = ""


class KnownHosts:
    """The keys in the files, and those added to them. Any thread may call."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()

    def known(self, name: str, paths: Iterable[str]) -> KnownKeys:
        """Return the files' keys for the host of this name. Errors: LaunchError as `judge`"""
        with self._lock:
            return self._known(name, paths)

    def judge(self, key: HostKey, names: HostNames, paths: Sequence[str], *, adds: bool) -> KeyFinding:
        """Judge the key; an unknown one is added to the first file if `adds`, and is UNKNOWN.

        Errors: LaunchError if an existing file cannot be a list of hosts
        """
        with self._lock:
            finding = self._judge(key, names, paths)
            if finding.standing is not Standing.UNKNOWN or not adds or not paths:
                return finding
            # Another process may have written to it since it was read: its present content decides.
            if self._file(paths[0]).is_out_of_date():
                del self._files[paths[0]]
                finding = self._judge(key, names, paths)
            if finding.standing is not Standing.UNKNOWN:
                return finding
            try:
                self._file(paths[0]).add(names.name, key)
            except OSError as error:
                return finding._replace(unwritten=f"{paths[0]}: {error.strerror or error}")
            return finding

    def _judge(self, key: HostKey, names: HostNames, paths: Sequence[str]) -> KeyFinding:
        known = self._known(names.name, paths)
        standing = known.standing(key)
        if names.portless and standing is Standing.UNKNOWN:
            other = self._known(names.portless, paths)
            if other.standing(key) in (Standing.KNOWN, Standing.REVOKED):
                known, standing = other, other.standing(key)
        if names.address and standing in (Standing.KNOWN, Standing.UNKNOWN):
            other = self._known(names.address, paths)
            if other.standing(key) in (Standing.CHANGED, Standing.REVOKED):
                known, standing = other, other.standing(key)
        return KeyFinding(standing, known)

    def _known(self, name: str, paths: Iterable[str]) -> KnownKeys:
        found = [one for path in paths for one in self._file(path).of(name)]
        return KnownKeys(*(tuple(key for marker, key in found if marker is wanted) for wanted in KeyMarker))

    def _file(self, path: str) -> _File:
        if path not in self._files:
            self._files[path] = _File(path)
        return self._files[path]


def can_be_written(name: str) -> bool:
    """Tell whether a line for this host, without its port, means it and no other one."""
    return bool(name) and not _UNWRITABLE & set(name)


class _File:
    """The lines of one file by host name; a missing or unreadable file has none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._plain: dict[str, list[_Line]] = {}  # by name, in lower case
        self._patterns: list[tuple[tuple[str, ...], _Line]] = []
        self._hashed: list[tuple[bytes, bytes, _Line]] = []  # salt, digest, line
        self._num_lines = 0
        self._state = _state_of(path)
        if path == NO_FILE:
            return
        try:
            text = read_named(Path(path)).decode("utf-8", "surrogateescape")
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        except OSError as error:
            raise LaunchError(
                f"{path}: cannot be read as a list of known hosts ({error.strerror}); make it a regular "
                "file, or name another with UserKnownHostsFile in the ssh configuration"
            ) from None
        for line in text.split("\n"):
            self._note(line.partition("\0")[0])

    def of(self, name: str) -> list[_Line]:
        name = _lower(name)
        encoded = name.encode("utf-8", "surrogateescape")
        hashed = [
            line for salt, digest, line in self._hashed if hmac.digest(salt, encoded, hashlib.sha1) == digest
        ]
        fitting = [line for patterns, line in self._patterns if fits_list(patterns, name)]
        return [*self._plain.get(name, ()), *fitting, *hashed]

    def is_out_of_date(self) -> bool:
        return _state_of(self._path) != self._state

    def add(self, name: str, key: HostKey) -> None:
        """Add a line, after the end of the last one. Errors: OSError if it cannot be written"""
        line = f"{name} {key.kind} {base64.b64encode(key.blob).decode()}"
        Path(self._path).parent.mkdir(mode=0o700, exist_ok=True)
        with open(self._path, "ab+") as stream:
            is_whole = True
            if stream.seekable() and stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                is_whole = stream.read(1) == b"\n"
            stream.write(f"{'' if is_whole else chr(10)}{line}\n".encode("utf-8", "surrogateescape"))
        self._note(line)
        self._state = _state_of(self._path)

    def _note(self, text: str) -> None:
        self._num_lines += 1
        words = text.strip(" \t\r").replace("\t", " ").split(" ", 1)
        marker = KeyMarker.NONE
        if words[0].startswith("@"):
            if words[0] not in (KeyMarker.REVOKED.value, KeyMarker.AUTHORITY.value) or len(words) < 2:
                return
            marker, words = KeyMarker(words[0]), words[1].lstrip(" ").split(" ", 1)
        names = words[0]
        if not names or names[0] in "#@" or len(words) < 2:
            return
        key = _read_key(words[1], f"{self._path}:{self._num_lines}")
        if key is not None:
            self._file_under(names, (marker, key))

    def _file_under(self, names: str, line: _Line) -> None:
        if names.startswith("|"):
            with contextlib.suppress(ValueError, binascii.Error):
                salt, digest = (
                    base64.b64decode(one, validate=True) for one in names.removeprefix(_HASHED).split("|")
                )
                if names.startswith(_HASHED) and len(salt) == hashlib.sha1().digest_size:
                    self._hashed.append((salt, digest, line))
            return
        patterns = tuple(_lower(names).split(","))
        if any(len(one) >= _MAX_NAME for one in patterns):
            return
        if any(has_signs(one) or one.startswith("!") for one in patterns):
            self._patterns.append((patterns, line))
            return
        for name in dict.fromkeys(patterns):
            self._plain.setdefault(name, []).append(line)


_Line = tuple[KeyMarker, HostKey]


def _read_key(text: str, place: str) -> HostKey | None:
    """Return the key of `KIND BASE64 COMMENT`; None for a text that OpenSSH could not read either."""
    kind, *rest = text.split(maxsplit=2)
    if not rest or kind.startswith("#"):
        return None
    try:
        blob = base64.b64decode(rest[0], validate=True)
    except (ValueError, binascii.Error):
        return None
    parts = _strings_of(blob)
    if parts[:1] != [kind.encode("utf-8", "surrogateescape")] or len(parts) < 2:
        return None
    return HostKey(kind, blob, place)


def _strings_of(blob: bytes) -> list[bytes]:
    """Return the strings of a key, each of which has its length in front; none if the key is cut off.

    A certificate also holds other values: of these only the first string is returned.
    """
    parts: list[bytes] = []
    at = 0
    while at < len(blob):
        end = at + 4 + int.from_bytes(blob[at : at + 4], "big")
        if end > len(blob) or at + 4 > len(blob):
            return []
        parts.append(blob[at + 4 : end])
        at = end
    return parts


def _lower(name: str) -> str:
    """Return the text with its ASCII letters in lower case, as OpenSSH does."""
    return name.encode("utf-8", "surrogateescape").lower().decode("utf-8", "surrogateescape")


def _state_of(path: str) -> tuple[int, int, int] | None:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None

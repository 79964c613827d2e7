"""The keys that known_hosts files have for a host, each file read once for all connections.

paramiko would read every file again for every connection, and compare each line with all before it: with N
hosts in the file and N connections that is N cubed, most of what a start on many hosts took.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import threading
from collections.abc import Iterable
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

from ..errors import LaunchError
from ..inputs.named_file import read_named

_HASHED = "|1|"  # then salt|HMAC-SHA1 of the name, both in base64


class KnownHosts:
    """What the files say, and what is added to them. Any thread may call."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()

    def keys_of(self, name: str, paths: Iterable[str]) -> list[paramiko.PKey]:
        """The keys of the host that is called `name` there, at most one of each kind: the first."""
        with self._lock:
            lines = [line for path in paths for line in self._file(path).lines_of(name)]
        keys: dict[str, paramiko.PKey] = {}
        for line in lines:
            with contextlib.suppress(InvalidHostKey, paramiko.SSHException):
                entry = HostKeyEntry.from_line(line)
                if entry is not None and entry.key is not None:
                    keys.setdefault(entry.key.get_name(), entry.key)
        return [*keys.values()]

    def has_authorities(self, paths: Iterable[str]) -> bool:
        """Whether a line names an authority, whose certificates only OpenSSH reads."""
        with self._lock:
            return any(self._file(path).has_authorities for path in paths)

    def add(self, name: str, key: paramiko.PKey, path: str) -> None:
        """Add a line to a file, unless a connection at the same time has added it.

        Errors: OSError if it cannot be written
        """
        line = f"{name} {key.get_name()} {key.get_base64()}"
        with self._lock:
            file = self._file(path)
            if line in file.lines_of(name):
                return
            Path(path).parent.mkdir(mode=0o700, exist_ok=True)
            with Path(path).open("a") as stream:
                stream.write(f"{line}\n")
            file.note(line)

    def _file(self, path: str) -> _File:
        if path not in self._files:
            self._files[path] = _File(path)
        return self._files[path]


class _File:
    """The lines of one file by host name; one that is not there, or is not ours to read, has none."""

    def __init__(self, path: str) -> None:
        self._lines: dict[str, list[str]] = {}
        self._hashed: list[tuple[bytes, bytes, str]] = []  # salt, digest, line
        self.has_authorities = False
        try:
            text = read_named(Path(path)).decode("utf-8", "replace")
        except (FileNotFoundError, PermissionError):
            return
        except OSError as error:
            raise LaunchError(
                f"{path}: cannot be read as a list of known hosts ({error.strerror}); make it a regular "
                "file, or name another with UserKnownHostsFile in the ssh configuration"
            ) from None
        for line in text.splitlines():
            self.note(line.strip())

    def note(self, line: str) -> None:
        if line.startswith("@cert-authority"):
            self.has_authorities = True
        if not line or line[0] in "#@":  # @revoked and @cert-authority: paramiko knows neither
            return
        for name in line.split(maxsplit=1)[0].split(","):
            if not name.startswith(_HASHED):
                self._lines.setdefault(name, []).append(line)
                continue
            with contextlib.suppress(ValueError, binascii.Error):
                salt, digest = (base64.b64decode(one) for one in name.removeprefix(_HASHED).split("|"))
                self._hashed.append((salt, digest, line))

    def lines_of(self, name: str) -> list[str]:
        encoded = name.encode()
        hashed = (
            line for salt, digest, line in self._hashed if hmac.digest(salt, encoded, hashlib.sha1) == digest
        )
        return [*self._lines.get(name, ()), *hashed]

"""Memory servers in processes of their own, as agents have them, with few imports.

`python memory_hosts.py SOCKET [FREE_BYTES]` is one: it prints its port, and takes lines of JSON for `meet`.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOKEN = secrets.token_hex(16)


class MemoryHost:
    """One server, and the path of its socket."""

    def __init__(self, folder: Path, name: str, *, free_bytes: int | None = None) -> None:
        self.name, self.socket = name, folder / f"memory-{name}"
        more = [] if free_bytes is None else [str(free_bytes)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.socket), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.pid = self._process.pid

    def meet(self, hosts: list[MemoryHost], partner: str, token: str = TOKEN) -> None:
        peers = [[one.name, ["127.0.0.1"], one.port] for one in hosts]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([self.name, peers, partner, token]) + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self) -> None:
        """Lose the host with all that it holds."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self.socket.unlink(missing_ok=True)


def introduce(hosts: list[MemoryHost], partners: Mapping[str, str] | None = None) -> None:
    """Let each know all; the partner is the next one, if there are no others."""
    for place, host in enumerate(hosts):
        following = hosts[(place + 1) % len(hosts)].name if len(hosts) > 1 else ""
        host.meet(hosts, following if partners is None else partners.get(host.name, ""))


@contextmanager
def memory_hosts(folder: Path, *names: str, **more: Any) -> Iterator[list[MemoryHost]]:
    hosts = [MemoryHost(folder, name, **more) for name in names]
    try:
        introduce(hosts)
        yield hosts
    finally:
        for one in hosts:
            one.close()


def _serve() -> None:
    from dslaunch.launcher.node.memory.copier import MemoryPeer
    from dslaunch.launcher.node.memory.room import free_bytes
    from dslaunch.launcher.node.memory.server import MemoryServer

    path, *free = sys.argv[1:]
    server = MemoryServer((lambda: int(free[0])) if free else free_bytes)
    server.listen(path)
    os.write(1, b"%d\n" % server.port)
    for line in sys.stdin:
        name, peers, partner, token = json.loads(line)
        server.meet(name, [MemoryPeer(*one) for one in peers], partner, token)
        os.write(1, b"met\n")


if __name__ == "__main__":
    _serve()

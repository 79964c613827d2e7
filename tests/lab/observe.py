"""What the tests of the lab see of a host: lines of its commands, what its sshd says,
how a connection ends.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.lab import Host

SOON_S = 10.0  # for things that take milliseconds on an idle machine
QUIET_S = 0.3  # how long "nothing comes" is watched; a reset or a line in this network takes less than 1 ms
BANNER = 'exec 3<>"/dev/tcp/$0/22" && read -r -t "$1" -u 3 line && echo "$line"'
SERVER = """\
import socket
listener = socket.create_server(("", 5000)); print("listening", flush=True)
connection = listener.accept()[0]
while data := connection.recv(100): print(data.decode(), flush=True)
"""
CLIENT = """\
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000)); print("connected", flush=True)
try: end = connection.recv(100)
except ConnectionResetError: end = b""
print("closed", flush=True)
"""


@contextlib.contextmanager
def running(host: Host, *argv: str, **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    """A command on a host with pipes; killed and waited for at the end."""
    with host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **kwargs) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def connected(client: Host, server: Host) -> Iterator[subprocess.Popen[str]]:
    """A process on `client` with a connection to one on `server`; it prints `closed` once
    it hears of an end.
    """
    with running(server, sys.executable, "-c", SERVER) as listener:
        assert next_line(listener) == "listening"
        with running(client, sys.executable, "-c", CLIENT, server.address) as process:
            assert next_line(process) == "connected"
            yield process


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert is_readable(process, SOON_S), "no line came"
    return process.stdout.readline().rstrip("\n")


def is_readable(process: subprocess.Popen[str], timeout_s: float) -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], timeout_s)[0])


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def ssh(host: Host, target: str, command: str) -> subprocess.CompletedProcess[str]:
    return host.run(["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", target, command])


def banner(host: Host, target: str, *, within_s: float = 5.0) -> str:
    """What sshd of `target` says first; '' if nothing comes in time."""
    return host.run(["bash", "-c", BANNER, target, str(within_s)]).stdout

"""Short notes that the ranks leave each other in the job's store, by which they find each other
without a collective.

A connection of our own
-----------------------
What waits in torch's own client of the store keeps others from using it, so a board has one more. torch's
TCPStore serves from the process of rank 0, and its client has two manners that a thread in the background
must not have: it prints twenty lines when that process has ended, as it does at the end of every job, and it
waits without limit if it is stopped. So the socket is looked at before each call, and each call is made by a
thread that may be left behind.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # all three are there

T = TypeVar("T")
_CALL_S = 10.0  # limit of one answer; a store that works takes less than a millisecond


class BoardLost(Exception):
    """The store does not answer, or has ended with the process that served it."""


class Board:
    """Notes by name. All methods but the construction may be called by one thread of any kind.

    Errors: BoardLost
    """

    def __init__(self, store: Any, *, rank: int) -> None:
        """`store` is the default group's. The ranks' n-th boards are one board.

        Order: every rank must construct its boards in the same order, but none waits for another
        """
        job = store.compare_set("dslaunch/boards", "", os.urandom(8).hex()).decode()
        self._prefix = f"dslaunch/{job}/{store.add(f'dslaunch/boards/{rank}', 1)}"
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self.place = "a file"
        self._socket: socket.socket | None = None
        self._file: Path | None = None
        if isinstance(store, TCPStore):
            self.place = f"{store.host}:{store.port}"
            before = _connections_to(store.port)
            uses_libuv = store.libuvBackend  # type: ignore[attr-defined]  # torch forgot to list it
            # like the job's store: some builds of torch have no libuv, and their users set USE_LIBUV=0
            self._store: Any = TCPStore(store.host, store.port, is_master=False, use_libuv=uses_libuv)
            opened = _connections_to(store.port) - before
            if opened:
                self._socket = socket.socket(fileno=os.dup(max(opened)))
        elif isinstance(store, FileStore):
            self._file = Path(store.path)  # type: ignore[attr-defined]  # torch forgot to list it
            self._store = FileStore(str(self._file))
        else:
            raise BoardLost(f"{type(store).__name__} has no second connection")
        self._late: Future[Any] | None = None  # a call that was not waited for any longer

    def set(self, name: str, text: str) -> None:
        """Leave a note."""
        self._call(lambda: self._store.set(f"{self._prefix}/{name}", text))

    def has(self, *names: str) -> bool:
        """True if all these notes are there."""
        keys = [f"{self._prefix}/{name}" for name in names]
        return bool(self._call(lambda: self._store.check(keys)))

    def get(self, name: str) -> bytes:
        """Read a note that is there."""
        return bytes(self._call(lambda: self._store.get(f"{self._prefix}/{name}")))

    def is_first(self, name: str) -> bool:
        """True the first time that this name is asked for."""
        return bool(self._call(lambda: self._store.add(f"{self._prefix}/{name}", 1)) == 1)

    def close(self) -> None:
        """Let the connection go. A call that was left behind keeps it until it ends."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._store = None  # the board may live on in a cycle of objects until a garbage collection

    def _call(self, call: Callable[[], T]) -> T:
        if self._late is not None and not self._late.done():
            raise BoardLost(f"the store at {self.place} does not answer")
        if self._store is None or not dist.is_initialized() or not self._is_open():
            raise BoardLost(f"the store at {self.place} has ended")
        answer: Future[T] = Future()
        self._late = answer
        threading.Thread(target=_fulfil, args=(answer, call), daemon=True).start()
        try:
            return answer.result(timeout=_CALL_S)
        except TimeoutError:
            raise BoardLost(f"the store at {self.place} does not answer") from None
        except RuntimeError as error:
            raise BoardLost(f"the store at {self.place}: {error}") from error

    def _is_open(self) -> bool:
        if self._file is not None:
            # torch would try to open a missing file for minutes, a hundred times a second
            return self._file.exists()
        if self._socket is None:
            return True
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:  # open, and nothing to read
            return True
        except OSError:
            return False


def _fulfil(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except RuntimeError as error:
        answer.set_exception(error)


def _connections_to(port: int) -> set[int]:
    """Return this process's descriptors of connections to that port."""
    descriptors = set()
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if (
                    connection.family in (socket.AF_INET, socket.AF_INET6)
                    and connection.getpeername()[1] == port
                ):
                    descriptors.add(int(name))
        except OSError:  # not connected, or closed meanwhile
            continue
    return descriptors

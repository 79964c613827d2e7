"""Ranks on the fake device: as `Ranks` of tests/runtime, in processes whose torch has a CUDA device each.

`python -m tests.fake_cuda.ranks SOCKET` is the process that they are forked from: it has loaded the device
before torch, and torch before the first fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 60.0
MAX_DEVICES = 8  # as in machine.h


class _Forked:
    """One of the processes. Its parent is not this process, and waits for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """At once, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def join(self) -> None:
        """Its pipe is closed when it has ended: there is nothing to wait for."""


class Parent:
    """The process that they are forked from."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fake_cuda.ranks", str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._ours.settimeout(START_S)
        self._ours.sendall(multiprocessing.current_process().authkey)  # tensors are shared by it

    def fork(self) -> tuple[_Forked, Connection]:
        """Return one more, and the pipe to it."""
        ours, theirs = socket.socketpair()
        self._ours.sendall(b"f")
        reduction.send_handle(_Handle(self._ours), theirs.fileno(), self._process.pid)
        theirs.close()
        pid = int.from_bytes(self._ours.recv(8), "big")
        return _Forked(pid), Connection(ours.detach())

    def stop(self) -> None:
        """No more of them."""
        self._ours.close()
        self._process.kill()
        self._process.wait()


class _Handle:
    """A socket as `send_handle` takes it."""

    def __init__(self, of: socket.socket) -> None:
        self._of = of

    def fileno(self) -> int:
        return self._of.fileno()


def _be_parent(number: int) -> None:
    from tests.fake_cuda import torch_cuda

    native = torch_cuda.load()

    from tests.fake_cuda import nccl

    nccl.install(native)

    import tests.runtime.ranks as plain

    # transformers imports it, and it asks for the GPU's generation: after that no process can be forked
    sys.modules["torchao"] = None  # type: ignore[assignment]
    for name in plain.IMPORTED:  # once, and not in each process: it takes a second
        with suppress(ImportError):
            import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    asked = socket.socket(fileno=number)
    multiprocessing.current_process().authkey = asked.recv(len(multiprocessing.current_process().authkey))
    while asked.recv(1):
        pipe = Connection(reduction.recv_handle(_Handle(asked)))
        pid = os.fork()
        if pid == 0:
            asked.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            plain.serve(pipe, _group_on(native))
            os._exit(0)
        pipe.close()
        asked.sendall(pid.to_bytes(8, "big"))


def _group_on(native: Any) -> Callable[[int, int, str], Any]:
    import torch
    import torch.distributed as dist

    from dslaunch.runtime.comm import captures

    captures._driver = lambda: native.captures
    is_first = True

    @contextmanager
    def group(rank: int, world_size: int, store: str) -> Iterator[None]:
        """All ranks on one host with a device for each; afterwards the device must have found nothing."""
        nonlocal is_first
        if is_first:  # autograd has a queue for each device that is there at the first backward of a process
            torch.cuda.init()
            native.set_num_devices(MAX_DEVICES)
            torch.ones(1, requires_grad=True).sum().backward()
            is_first = False
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        native.set_num_devices(world_size)
        torch.cuda._cached_device_count = None  # of the call before, as the generators
        torch.cuda.default_generators = tuple(native.generator(index) for index in range(world_size))
        native.set_device(rank)
        native.clear_conflicts()
        native.forget_touched()
        native.touch(rank, "its own")
        native.captures.broken_by.clear()
        dist.init_process_group(
            "nccl",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            device_id=torch.device("cuda", rank),
        )
        try:
            yield
            torch.cuda.synchronize()
            dist.barrier()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        found = native.conflicts()
        assert not found, found
        others = {device: what for device, what in native.touched().items() if device != rank}
        assert not others, f"rank {rank} has touched devices of others, each first by {others}"
        broken_by = sorted(native.captures.broken_by)
        assert not broken_by, f"threads {broken_by} would break a capture of another: see ignore_captures()"

    return group


if __name__ == "__main__":
    assert threading.active_count() == 1
    _be_parent(int(sys.argv[1]))

"""Programs that end with this process, however it ends.

The kernel takes the thread that started a program for its parent: a program that ends with its parent ends
with that thread. So one thread starts all programs, and that thread lives as long as the process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from ..node.system.process_tree import die_with_parent


class ChildStarter:
    """Starts programs. Any thread may call `start`."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        with contextlib.suppress(ImportError):
            import _ctypes  # noqa: F401 - so that not every child loads it before it becomes the program
        threading.Thread(target=self._run, name="starts programs", daemon=True).start()

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a program with three pipes, in a session of its own, where no Ctrl-C of the terminal reaches
        it. It gets SIGTERM when this process ends.

        Errors: OSError as from subprocess.Popen
        """
        request = _Request(tuple(argv), dict(env))
        self._requests.put(request)
        request.is_done.wait()
        if request.error is not None:
            raise request.error
        if request.process is None:
            raise AssertionError("neither a process nor an error")
        return request.process

    def _run(self) -> None:
        while True:
            request = self._requests.get()
            try:
                request.process = _started(request.argv, request.env)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                request.error = error
            request.is_done.set()


@functools.cache
def child_starter() -> ChildStarter:
    """Return the starter of this process."""
    return ChildStarter()


class _Request:
    def __init__(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        self.argv = argv
        self.env = env
        self.is_done = threading.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self.error: Exception | None = None


def _started(argv: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
    us = os.getpid()
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=env,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(us, signal.SIGTERM),
    )

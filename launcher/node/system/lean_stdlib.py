"""The few functions of slow modules that agents need, built on the C modules below these.

`signal`, `contextlib`, `selectors` and `collections`, with `enum` and `functools` that they import, take 5 ms
of CPU on every host of a job, of 24 until an agent was up. Without the C modules the slow ones are used.
"""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as signal
    from collections import deque as deque
    from collections.abc import Callable, Iterator
    from contextlib import suppress as suppress
else:
    try:
        import _signal as signal  # the same functions; numbers instead of enumerations
        from _collections import deque  # noqa: F401 - for others
    except ImportError:
        import signal

    class suppress:
        """Does the same as contextlib.suppress."""

        def __init__(self, *kinds):
            self._kinds = kinds

        def __enter__(self):
            return None

        def __exit__(self, kind, error, trace):
            return kind is not None and issubclass(kind, self._kinds)


def name_of_signal(number: int) -> str:
    """Return SIGTERM for 15."""
    names = (name for name in dir(signal) if name.startswith("SIG") and not name.startswith("SIG_"))
    return next((name for name in names if getattr(signal, name) == number), str(number))


class Selector:
    """Watched files, each with its actions for reading and writing."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._acts: dict[int, Callable[[], object]] = {}  # actions by file descriptor

    def on_read(self, fd: int, act: Callable[[], object]) -> None:
        self._poll.register(fd, select.EPOLLIN)
        self._acts[fd] = act

    def on_write(self, fd: int, act: Callable[[], object]) -> None:
        self._poll.register(fd, select.EPOLLOUT)
        self._acts[fd] = act

    def __contains__(self, fd: int) -> bool:
        return fd in self._acts

    def forget(self, fd: int) -> None:
        """Stop watching the file, if it is watched."""
        if self._acts.pop(fd, None) is not None:
            with suppress(OSError):  # a closed file, which the kernel has forgotten
                self._poll.unregister(fd)

    def __iter__(self) -> Iterator[int]:
        return iter(self._acts)

    def wait(self, timeout_s: float) -> int:
        """Wait until an action is due or the time is up; then do all that are due.

        Return the number of their files.
        """
        ready = self._poll.poll(timeout_s)
        for fd, _ in ready:
            act = self._acts.get(fd)  # an action may forget another file
            if act is not None:
                act()
        return len(ready)

    def close(self) -> None:
        self._poll.close()

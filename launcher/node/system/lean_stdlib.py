"""The few things that agents need of slow modules, by the C modules below these.

Sent to the nodes: standard library only.

`signal`, `contextlib`, `selectors` and `collections`, with `enum` and `functools` that they import, take 5 ms
of CPU on every host of a job, of 24 until an agent was up. Where a Python lacks the C modules, they are used.
"""

from __future__ import annotations

import select

TYPE_CHECKING = False  # typing is slow to import
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
        """As contextlib.suppress."""

        def __init__(self, *kinds):
            self._kinds = kinds

        def __enter__(self):
            return None

        def __exit__(self, kind, error, trace):
            return kind is not None and issubclass(kind, self._kinds)


def name_of_signal(number: int) -> str:
    """SIGTERM for 15."""
    names = (name for name in dir(signal) if name.startswith("SIG") and not name.startswith("SIG_"))
    return next((name for name in names if getattr(signal, name) == number), str(number))


class Selector:
    """Files that are watched, each with what is to be done when it can be read, or written."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._acts: dict[int, Callable[[], object]] = {}  # by file descriptor

    def on_read(self, fd: int, act: Callable[[], object]) -> None:
        self._poll.register(fd, select.EPOLLIN)
        self._acts[fd] = act

    def on_write(self, fd: int, act: Callable[[], object]) -> None:
        self._poll.register(fd, select.EPOLLOUT)
        self._acts[fd] = act

    def __contains__(self, fd: int) -> bool:
        return fd in self._acts

    def forget(self, fd: int) -> None:
        """Nothing happens if it is not watched."""
        if self._acts.pop(fd, None) is not None:
            with suppress(OSError):  # closed already: then the kernel has forgotten it
                self._poll.unregister(fd)

    def __iter__(self) -> Iterator[int]:
        return iter(self._acts)

    def wait(self, timeout_s: float) -> int:
        """Until something can be done or the time is up; then do all that can be done.

        Returns how many files that was.
        """
        ready = self._poll.poll(timeout_s)
        for fd, _ in ready:
            act = self._acts.get(fd)  # an act may forget another file
            if act is not None:
                act()
        return len(ready)

    def close(self) -> None:
        self._poll.close()

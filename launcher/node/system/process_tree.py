"""The processes below this one: adopting them, finding them, ending them.

No process escapes. A process that calls PR_SET_CHILD_SUBREAPER becomes the parent of every descendant whose
own parent died, however often it forked and whatever session it made for itself. So the tree below the agent
is exactly the job, and walking parent links in /proc finds all of it.
"""

from __future__ import annotations

import os
import time

from .kernel_file import read_text
from .lean_stdlib import signal, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

QUIET_S = 2.0  # how long killed processes are waited for before they are named
_MAX_NAMED = 3
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    try:
        import _ctypes  # ctypes is made of it, and takes three times as long

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type] # stubs
        result = _ctypes.call_function(prctl, (option, value, 0, 0, 0))
    except (ImportError, AttributeError):  # private to CPython, in this form since 2.5
        import ctypes

        result = ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    if result != 0:
        raise OSError(f"prctl({option}, {value}) failed")


def become_subreaper() -> None:
    """Adopt every descendant that loses its parent."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int, signum: int) -> None:
    """Get `signum` when the parent dies; at once if it already did."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signum)


def descendants(root: int, *, besides: Callable[[], Collection[int]] = tuple) -> list[int]:
    """Process ids below `root`, without zombies, parents before children; without those `besides`, which are
    asked for last, and what is below these.
    """
    if root == os.getpid() and not _has_children():
        # Most jobs have none at their end: otherwise a busy host has thousands of processes to look at
        return []
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended while we looked
        state, parent, num_threads = fields[0], fields[1], int(fields[17])
        # A process whose first thread ended looks like a zombie, but has other threads that run.
        if state not in (b"Z", b"X") or num_threads > 1:
            children.setdefault(int(parent), []).append(int(name))
        # a zombie's children have been given to the subreaper, so no process is hidden behind it
    found, frontier, left_out = [], [root], besides()
    while frontier:
        below = [pid for parent in frontier for pid in children.get(parent, ()) if pid not in left_out]
        found += below
        frontier = below
    return found


def _has_children() -> bool:
    """Tell whether this process has any child, zombies included.

    A process without children has no other processes below it either.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill_descendants(
    root: int, signum: int = signal.SIGKILL, *, besides: Callable[[], Collection[int]] = tuple
) -> list[int]:
    """Send `signum` to every process below `root` but those `besides`; return their ids.

    Repeat until it returns none.
    """
    pids = descendants(root, besides=besides)
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):  # it ended, or became another user's
            os.kill(pid, signum)
    return pids


def end_descendants(say: Callable[[str], object] = lambda _: None) -> None:
    """Kill every process below this one, and wait until none is left. `say` is told, once, which processes
    take long: the kernel keeps one while a file system or a device that it uses hangs.
    """
    own = os.getpid()
    quiet_until = time.monotonic() + QUIET_S
    while pids := kill_descendants(own) or descendants(own):
        reap()
        if time.monotonic() > quiet_until:
            quiet_until = float("inf")
            say(f"waiting for the end of {_names(pids)}, to which SIGKILL was sent")
        time.sleep(0.01)


def _names(pids: list[int]) -> str:
    """Name the first few: "ssh (process 12) and 2 others"."""
    named = [f"{read_text(f'/proc/{pid}/comm').strip()} (process {pid})" for pid in pids[:_MAX_NAMED]]
    num_others = len(pids) - len(named)
    return ", ".join(named) + (f" and {num_others} others" if num_others else "")


def reap() -> list[tuple[int, int]]:
    """Collect every child that ended, without waiting: (pid, wait status)."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))

"""What /proc says about processes, and waiting for it to change.

All pids are as the machine outside sees them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from .place import LabError

POLL_S = 0.002
REST = 3  # times as long as a look has taken: the processor is left to those that are waited for
DEATH_TIMEOUT_S = 20.0  # SIGKILL takes effect within milliseconds; a loaded machine may be slow to say so


def wait_until(is_done: Callable[[], bool], *, timeout_s: float) -> bool:
    """Poll until `is_done()`; False if that did not happen within the time."""
    looked_at = time.monotonic()
    deadline = looked_at + timeout_s
    while not is_done():
        now = time.monotonic()
        if now > deadline:
            return False
        time.sleep(max(POLL_S, REST * (now - looked_at)))
        looked_at = time.monotonic()
    return True


def namespace_of(file: Path) -> str | None:
    """`net:[4026532281]` for the kind in /proc/PID/ns/KIND, or for a file in /run/netns;
    None if it is gone.
    """
    try:
        if file.parent.name == "ns":
            return os.readlink(file)
        return f"net:[{file.stat().st_ino}]"
    except OSError:
        return None


def pids_in(namespace: str) -> tuple[int, ...]:
    """The processes in a namespace such as `pid:[4026532281]`; zombies and processes past
    their end are not.
    """
    return pids_by_namespace(namespace.partition(":")[0]).get(namespace, ())


def pids_by_namespace(kind: str) -> dict[str, tuple[int, ...]]:
    """The processes in every namespace of a kind, by its name; one look at /proc, 2 ms for 300 processes."""
    found: dict[str, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # a zombie, or gone
                found.setdefault(os.readlink(f"/proc/{entry}/ns/{kind}"), []).append(int(entry))
    return {namespace: tuple(pids) for namespace, pids in found.items()}


def command_line(pid: int) -> str:
    """The arguments joined by spaces, `[name]` if it has none, '' if it is a zombie or gone:
    as `ps -ef` shows them.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        if words:
            return words.rstrip(b"\0").replace(b"\0", b" ").decode(errors="surrogateescape")
        name, state = _stat(pid)[1:3]
    except OSError:
        return ""
    return "" if state in "ZX" else f"[{name}]"


def program(pid: int) -> str:
    """The file name of the program it runs, '' if it is gone."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return ""


def state(pid: int) -> str:
    """The letter of `ps`: R, S, D, T (stopped), Z (zombie); '' if it is gone."""
    try:
        return _stat(pid)[2]
    except OSError:
        return ""


def start_time(pid: int) -> str:
    """When it started, in clock ticks since boot; with the pid it names one process for ever.

    '' if it is gone.
    """
    try:
        return _stat(pid)[21]
    except OSError:
        return ""


def inner_pid(pid: int) -> int:
    """Its pid in the innermost pid namespace it is in, 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[-1]) for line in lines if line.startswith("NSpid:")), 0)


def send_signal(pid: int, namespace: str, signum: int) -> None:
    """Signal `pid` if it still is a process of that namespace; a pid that was given to a
    stranger is left alone.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        kind = namespace.partition(":")[0]
        if namespace_of(Path(f"/proc/{pid}/ns/{kind}")) == namespace:
            signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        pass  # it ended meanwhile, which is what the caller wants or finds out by itself
    finally:
        os.close(pidfd)


def kill_until_gone(
    pids: Callable[[], tuple[int, ...]], namespace: str, *, after_kill: Callable[[], None]
) -> None:
    """SIGKILL everything `pids()` lists until it lists nothing. `after_kill` runs between the rounds.

    Errors: LabError with the processes that outlive DEATH_TIMEOUT_S.
    """

    def are_gone() -> bool:
        left = pids()
        for pid in left:
            send_signal(pid, namespace, signal.SIGKILL)
        after_kill()
        return not left

    if not wait_until(are_gone, timeout_s=DEATH_TIMEOUT_S):
        left = ", ".join(f"{pid} ({command_line(pid)})" for pid in pids())
        raise LabError(
            f"still alive {DEATH_TIMEOUT_S:.0f} s after SIGKILL: {left}; see their state in `ps -l`"
        )


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from 0: pid, name (may hold spaces and brackets), state, ...;
    [21] is the start time.
    """
    head, _, tail = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    number, _, name = head.partition(" (")
    return [number, name, *tail.split()]

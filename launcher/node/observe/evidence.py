"""Evidence on a worker's failure: its last lines, torch's notes, the kernel's counters."""

from __future__ import annotations

import os

from ...wire import fast_json
from ...wire.frames import text_of
from ..system.kernel_file import read_text
from ..system.lean_stdlib import deque, signal
from ..system.memory import memory_groups, size_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NUM_LAST_LINES = 20
NUM_KEPT_LINES = 500  # lines of stderr: a traceback may be longer than the lines that are shown otherwise
MAX_LINE_BYTES = 2000  # bytes of a kept line
MAX_ERROR_FILE_BYTES = 1 << 20
MAX_PLACE_BYTES = 200

TRACEBACK = "Traceback (most recent call last):"
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel
_KERNEL_LOG_READ_ALL, _KERNEL_LOG_SIZE = 3, 10


class Tail:
    """The last lines of a stream."""

    def __init__(self, num_lines: int) -> None:
        self._lines: deque[bytes] = deque(maxlen=num_lines)

    def add(self, data: bytes) -> None:
        """Take whole lines, each with its newline."""
        keep = self._lines.maxlen or 0
        for line in data.rsplit(b"\n", keep + 1)[-keep - 1 : -1]:
            if len(line) > MAX_LINE_BYTES:
                line = line[:MAX_LINE_BYTES] + b" ... (%d bytes more)" % (len(line) - MAX_LINE_BYTES)
            self._lines.append(line)

    @property
    def lines(self) -> list[str]:
        return [text_of(line) for line in self._lines]


def last_traceback(lines: list[str]) -> list[str]:
    """Return the last complete traceback of Python in `lines`, up to its exception; empty if there is none.

    Of a chain (`During handling of ...`) all parts are returned. Exceptions that Python ignored do not count.
    """
    found: list[str] = []
    found_end = 0  # the place after its end
    place = 0
    while place < len(lines):
        if unmarked(lines[place]).rstrip() != TRACEBACK:
            place += 1
            continue
        end = _end_of_traceback(lines, place)
        is_ignored = place > 0 and unmarked(lines[place - 1]).startswith("Exception ignored in")
        if end is not None and not is_ignored:
            is_chained = bool(found) and found_end == place - 3 and _is_chain(lines, place)
            found = [*found, *lines[place - 3 : end]] if is_chained else lines[place:end]
            found_end = end
        place = end or place + 1
    return found


def last_error(traceback: tuple[str, ...]) -> str:
    """Return the line of a traceback that names its last exception."""
    return next((unmarked(one) for one in reversed(traceback) if not _is_indented(one)), "")


def _end_of_traceback(lines: list[str], start: int) -> int | None:
    """Return the place after the exception of the traceback that begins at `start`; None if it is cut off."""
    place = start + 1
    while place < len(lines) and _is_indented(lines[place]):
        place += 1
    if place == len(lines) or place == start + 1 or not unmarked(lines[place]).strip():
        return None
    place += 1
    while place < len(lines) and _is_indented(lines[place]) and unmarked(lines[place]).strip():
        place += 1  # a message of several lines; those of torch are indented
    return place


def _is_chain(lines: list[str], start: int) -> bool:
    return start >= 3 and is_link(lines[start - 2])


def is_link(line: str) -> bool:
    """Tell whether the line says that the traceback behind it belongs to the one before."""
    return unmarked(line).startswith(
        ("During handling of the above exception", "The above exception was the direct cause")
    )


def _is_indented(line: str) -> bool:
    return unmarked(line).startswith((" ", "\t"))


def unmarked(line: str) -> str:
    """Return the line without the `[rank3]: ` that torch.distributed puts before each line of a traceback."""
    mark, end, text = line.partition("]:")
    if end and mark.startswith("[rank") and mark[5:].isdigit():
        return text[1:] if text.startswith(" ") else text
    return line


def read_error_file(path: str) -> tuple[str, list[str]]:
    """Return the message and the traceback that torch's @record left in a file; empty if there is none, or
    the file has another form.

    Source: torch 2.13 distributed/elastic/multiprocessing/errors/error_handler.py, `record_exception`.
    """
    from ..system.plain_file import read_plain

    try:
        text = read_plain(path, max_bytes=MAX_ERROR_FILE_BYTES).decode("utf-8", "surrogateescape")
        message = fast_json.read(text.strip())["message"]
    except (OSError, ValueError, LookupError, TypeError):
        return "", []
    if not isinstance(message, dict):
        return str(message), []
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return str(message.get("message", "")), stack.rstrip("\n").split("\n") if isinstance(stack, str) else []


def read_place(path: str | None) -> str:
    """Return the worker's place along the axes of its job, as its runtime wrote it, e.g. "stage 1 of 2, tp
    0"; empty if it wrote nothing, or nothing that can be shown.
    """
    from ..system.plain_file import read_plain

    try:
        text = read_plain(path, max_bytes=MAX_PLACE_BYTES).decode() if path else ""
    except (OSError, ValueError):
        return ""
    return text if text.isprintable() else ""


class MemoryWatch:
    """Finds workers that the kernel killed because memory ran out, by the counters of their cgroup.

    Workers start in the cgroup of this process. Counters are compared with their first values; one kill
    explains one worker, so that a worker that fails later does not count as killed too.
    """

    def __init__(self, *, proc: str = "/proc") -> None:
        self._groups = memory_groups(proc)  # its own one, then those above it
        self._hits = [group.hits() for group in self._groups]
        self._num_explained = self._num_kills() or 0
        self._began_s = _monotonic_of_kernel()

    def explain(self, pid: int, status: int, *, is_our_kill: bool) -> tuple[bool, list[str]]:
        """Return whether memory ran out for this worker that failed, and the sentences about it."""
        num_kills = self._num_kills()
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if num_kills is not None and num_kills > self._num_explained:
            limit = self._limit()
            if is_killed:
                self._num_explained += 1
                return True, [f"the kernel killed it for memory ({limit})"]
            self._num_explained = num_kills
            return True, [f"before it failed, the kernel killed a process here for memory ({limit})"]
        if not is_killed or is_our_kill:
            return False, []
        log = read_kernel_log()
        if log is not None and is_in_kernel_log(log, pid, since_s=self._began_s):
            return True, ["the kernel killed it for memory (the kernel's log says so)"]
        limit = _cpu_time_limit()
        if num_kills is None:
            if limit:
                return False, [f"who sent SIGKILL cannot be read here; it may be {limit}: see `dmesg`"]
            why = "often it is the kernel, when memory ran out: see `dmesg`"
            return False, [f"who sent SIGKILL cannot be read here; {why}"]
        if limit:
            return False, [f"it was not memory; it may be {limit}, or a person or a program sent SIGKILL"]
        return False, ["the kernel counts no lack of memory here, so a person or a program sent SIGKILL"]

    def _num_kills(self) -> int | None:
        return self._groups[0].kills() if self._groups else None

    def _limit(self) -> str:
        for group, before in zip(self._groups, self._hits):  # noqa: B905 - strict= needs Python 3.10
            limit = group.limit_bytes()
            if limit is not None and (group.hits() > before or group.was_full()):
                return f"cgroup limit {size_of(limit)}"
        return "the whole machine ran out of it"


def _cpu_time_limit() -> str:
    """Return words for a CPU time limit, for which the kernel kills processes too; empty if there is none."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY:
        return ""
    return f"the limit of {hard} s of CPU time that a process has here (ulimit -t)"


def read_kernel_log() -> str | None:
    """Return the kernel's log; None if this process may not read it, or sees other pids than the kernel."""
    if os.readlink("/proc/self/ns/pid") != _INITIAL_PID_NAMESPACE:
        return None
    import ctypes

    libc = ctypes.CDLL(None)
    size = libc.klogctl(_KERNEL_LOG_SIZE, None, 0)
    if size <= 0:
        return None
    buffer = ctypes.create_string_buffer(size)
    length = libc.klogctl(_KERNEL_LOG_READ_ALL, buffer, size)
    return buffer.raw[:length].decode("utf-8", "replace") if length >= 0 else None


def is_in_kernel_log(log: str, pid: int, *, since_s: float) -> bool:
    """Tell whether the kernel killed this process for memory, after `since_s` on its clock."""
    import re

    for at, victim in re.findall(r"\[ *([\d.]+)\].* Killed process (\d+) ", log):
        if int(victim) == pid and float(at) >= since_s - 1.0:
            return True
    return False


def evidence_of(
    status: int,
    *,
    facts: list[str],
    is_out_of_memory: bool,
    error_file: str | None,
    place_file: str | None = None,
    has_local_rank: bool = True,
    out: Tail,
    err: Tail,
) -> dict[str, Any]:
    """Return all facts about a failed worker, by the names of RankFailure's fields, as they travel in an
    Exited frame.

    `has_local_rank`: dslaunch added --local_rank=N to its arguments.
    """
    is_signaled = os.WIFSIGNALED(status)
    has_core = is_signaled and os.WCOREDUMP(status)
    if has_core:
        pattern = read_text("/proc/sys/kernel/core_pattern").strip()
        facts = [*facts, f"core dumped (kernel.core_pattern is {pattern!r})"]
    if is_signaled and os.WTERMSIG(status) == signal.SIGBUS:
        facts = [*facts, *_shared_memory()]
    message, recorded = read_error_file(error_file) if error_file else ("", [])
    of_err, of_out = err.lines, out.lines
    traceback = recorded or last_traceback(of_err)
    if has_local_rank and not is_signaled:
        # An exception is the cause of the failure; the lines before it are not.
        said = traceback or [*of_err[-NUM_LAST_LINES:], *of_out[-NUM_LAST_LINES:]]
        from .refused_argument import why_refused

        why = why_refused(said)
        facts = [*facts, why] if why else facts
    return {
        "place": read_place(place_file),
        "core_dumped": has_core,
        "is_out_of_memory": is_out_of_memory,
        "evidence": facts,
        "message": message,
        "traceback": traceback,
        "last_lines": (of_err or of_out)[-NUM_LAST_LINES:],
        "last_lines_of": "stderr" if of_err or not of_out else "stdout",
    }


def _shared_memory() -> list[str]:
    """Explain SIGBUS: often a write into a full shared memory file system; containers get 64 MiB."""
    try:
        disk = os.statvfs("/dev/shm")
    except OSError:
        return []
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    return [f"/dev/shm is full ({size_of(size)})"] if size and free < size // 20 else []


def _monotonic_of_kernel() -> float:
    """Return the seconds since boot, as the kernel's log counts them."""
    return float(read_text("/proc/uptime").split()[0] or 0) if read_text("/proc/uptime") else 0.0

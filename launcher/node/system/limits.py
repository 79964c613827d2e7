"""Limits of a host: room for the workers of a job, and the limit that a start met."""

from __future__ import annotations

import errno
import os
import resource

from .kernel_file import read_text
from .memory import memory_groups, size_of

NUM_SPARE_FILES = 24  # while workers start: the pipe of the next one, files of modules, /proc
FILES_PER_WORKER = 2  # the pipes of its stdout and stderr
# Snapshots: two files of each worker and of each whose copies are here, in two generations and what is used
# again, and its connections; beside them those of other hosts, and the files of no worker
SNAPSHOT_FILES_PER_WORKER = 16
SNAPSHOT_FILES = 256
PYTHON_BYTES = 8 << 20  # a Python that has imported nothing: 6 MiB of its own, and the kernel's data about it
CANNOT_START = "cannot start "  # begins each sentence of why_not_started()


def why_too_many(num_workers: int, *, is_python: bool) -> str:
    """Return why this host cannot take so many workers, and what to do; empty if no limit forbids it."""
    return (
        _why_too_few_files(num_workers)
        or _why_too_few_processes(num_workers)
        or (_why_too_little_memory(num_workers) if is_python else "")
    )


def raise_open_files(num_workers: int, *, holds_snapshots: bool) -> tuple[int, int] | None:
    """Let this process open the files that the workers and their snapshots take, if it may.

    Return the former limits, which the workers get; None if they did not change.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _files_needed(num_workers)
    if holds_snapshots:
        needed += SNAPSHOT_FILES + SNAPSHOT_FILES_PER_WORKER * num_workers
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return soft, hard


def lower_open_files(limits: tuple[int, int]) -> None:
    """Take raise_open_files() back: the workers that it was for have ended."""
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def restore_open_files(limits: tuple[int, int]) -> None:
    """Restore the host's limits in a worker, before it becomes the program.

    All files but the first three are closed: the agent's files may be more than the limit.
    """
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def why_not_started(what: str, error: BaseException) -> str:
    """Return a sentence for an error that says that a limit was met at the start of `what`.

    Empty for any other error.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        number = errno.EAGAIN
    if number == errno.EAGAIN:
        most = _shown(resource.getrlimit(resource.RLIMIT_NPROC)[0])
        why = (
            f"no more processes are allowed here (this user may have {most}, see ulimit -u; a container, a "
            "cgroup and the kernel have limits of their own); raise the limit, or start fewer workers here"
        )
    elif number == errno.EMFILE:
        most = _shown(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        why = (
            f"a process may have {most} open files here; raise the limit (ulimit -n), or start fewer workers"
        )
    elif number == errno.ENFILE:
        why = "the whole machine has no open file left (fs.file-max); end what holds so many"
    elif number == errno.ENOMEM:
        why = "there is no memory left; start fewer workers here, or end what takes it"
    else:
        return ""
    return f"{CANNOT_START}{what}: {why}"


def _files_needed(num_workers: int) -> int:
    return len(os.listdir("/proc/self/fd")) + NUM_SPARE_FILES + FILES_PER_WORKER * num_workers


def _why_too_few_files(num_workers: int) -> str:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = _files_needed(num_workers)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return ""
    return (
        f"{_workers(num_workers)} here take about {needed} open files of one process, and the hard limit is "
        f"{hard}; raise it (ulimit -Hn {needed}), or start fewer workers here"
    )


def _why_too_few_processes(num_workers: int) -> str:
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.getuid() and soft != resource.RLIM_INFINITY and soft < num_workers:
        return (
            f"{_workers(num_workers)} are to run here, and this user may have {soft} processes; raise the "
            f"limit (ulimit -u), or start fewer workers here"
        )
    most = read_text("/proc/sys/kernel/pid_max").strip()
    if most.isdigit() and int(most) < num_workers:
        return (
            f"{_workers(num_workers)} are to run here, and the kernel has {most} process ids "
            "(kernel.pid_max); start fewer workers here"
        )
    return ""


def _why_too_little_memory(num_workers: int) -> str:
    free = _free_bytes()
    needed = PYTHON_BYTES * num_workers
    if free is None or free >= needed:
        return ""
    return (
        f"{_workers(num_workers)} here take at least {size_of(needed)} of memory, {size_of(PYTHON_BYTES)} "
        f"for each Python before it imports anything, and {size_of(free)} are free; start fewer workers here"
    )


def _free_bytes() -> int | None:
    """Return the free memory of the machine, at most the limit of our cgroup; None if that cannot be read."""
    sizes = {}
    for line in read_text("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = rest.split()
    try:
        free = sum(int(sizes[name][0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (LookupError, ValueError):
        return None
    caps = (group.limit_bytes() for group in memory_groups())
    return min([free, *(cap for cap in caps if cap is not None)])


def _shown(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"

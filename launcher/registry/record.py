"""The record of one job in its folder: never a value of the environment."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from ..node.system.kernel_file import read_text
from ..options.detach import MAX_NAME_LENGTH, is_job_name

FILE = "job.json"
NEW_FILE = "job.json.new"
RESERVE_FILE = "reserve"  # its blocks are given up when the disk is full, for the last record
FORMAT = 1
_RESERVE_BYTES = 4096
_TEXTS = ("name", "key", "host", "boot_id", "cwd", "launcher", "console", "log_folder", "verdict", "problem")
_NUMBERS = ("pid", "num_ranks", "first_rank", "attempt", "began_at", "started_at", "ended_at", "exit_code")


class JobState(Enum):
    """The state of a job, as its own process has written it."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class JobRecord(NamedTuple):
    """Times are seconds of the wall clock, 0 for events that have not happened.

    `key` tells jobs of one name apart.
    """

    name: str
    key: str
    host: str
    boot_id: str
    pid: int
    command: tuple[str, ...]
    cwd: str
    launcher: str
    is_detached: bool
    console: str = ""  # the place of a foreground job's output
    hosts: tuple[str, ...] = ()
    num_ranks: int = 0
    first_rank: int = 0  # not 0 for the part of a node of a job without SSH
    shown: tuple[tuple[int, int], ...] | None = None  # first and last of the ranks that are shown; None: all
    log_folder: str = ""
    state: JobState = JobState.STARTING
    attempt: int = 0
    began_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    exit_code: int = 0
    verdict: str = ""
    problem: str = ""  # the part of its output that could not be kept

    @property
    def id(self) -> str:
        """Its exact name."""
        return f"{self.name}.{self.key}"

    def shows(self, rank: int) -> bool:
        """Tell whether the job shows this rank's output."""
        return self.shown is None or any(first <= rank <= last for first, last in self.shown)


def name_from(program: str, *, is_module: bool) -> str:
    """Return the name of a job without a given name: `train` for `src/train.py`."""
    base = os.path.basename(program.rstrip("/"))
    stem = program if is_module else base.removesuffix(".py").removesuffix(".sh")
    text = re.sub("[^A-Za-z0-9._-]+", "-", stem).strip("-._")[: MAX_NAME_LENGTH - 5]
    return text if is_job_name(text) else f"job-{text}".rstrip("-")


def this_host() -> str:
    return socket.gethostname()


def this_boot() -> str:
    """Return the id of this start of the kernel; containers on one machine share it."""
    return read_text("/proc/sys/kernel/random/boot_id").strip()


def as_json(record: JobRecord) -> dict[str, Any]:
    return {"format": FORMAT, **record._asdict(), "state": record.state.value}


def write_record(folder: Path, record: JobRecord) -> None:
    """Replace the record as a whole: a reader sees the old one or the new one, after a crash too.

    Errors: OSError; the old one is still there then
    """
    data = json.dumps(as_json(record)).encode() + b"\n"
    try:
        _replace(folder, data)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(folder / RESERVE_FILE)
        _replace(folder, data)
    if record.is_detached:  # the record of another job has no last change
        keep_reserve(folder, len(data))


def keep_reserve(folder: Path, size: int) -> None:
    """Hold blocks of the disk for one more record; without effect where there are none left."""
    path = folder / RESERVE_FILE
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            want = -(-size // _RESERVE_BYTES) * _RESERVE_BYTES
            if os.fstat(fd).st_size < want:
                os.pwrite(fd, b"\0" * want, 0)
        finally:
            os.close(fd)
    except OSError:
        return


def _replace(folder: Path, data: bytes) -> None:
    new = folder / NEW_FILE
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
    os.replace(new, folder / FILE)


def _fits(record: JobRecord) -> bool:
    """Tell whether texts and numbers have their types; readers of a record rely on it."""
    texts = [getattr(record, name) for name in _TEXTS]
    numbers = [getattr(record, name) for name in _NUMBERS]
    return all(isinstance(one, str) for one in texts) and all(
        isinstance(one, int | float) and math.isfinite(one) for one in numbers
    )


def read_record(folder: Path) -> JobRecord | None:
    """Return the record in this folder; None if there is no readable one."""
    try:
        found = json.loads((folder / FILE).read_bytes())
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            return None
        known = {name: found[name] for name in JobRecord._fields if name in found}
        record = JobRecord(**known)
        if not _fits(record):
            return None
        shown = None if record.shown is None else tuple((int(a), int(b)) for a, b in record.shown)
        return record._replace(
            state=JobState(record.state),
            command=tuple(map(str, record.command)),
            hosts=tuple(map(str, record.hosts)),
            shown=shown,
        )
    except (OSError, ValueError, TypeError):
        return None

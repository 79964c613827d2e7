"""Shows the journal of a job until the job has ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from .journal import Entry
from .journal_reader import JournalReader
from .known_jobs import KnownJob, look_at
from .replay import Replay

POLL_S = 0.1
REMOVED = "it has ended, and left no record; what started it was told how"
_LOOK_EVERY_S = 0.5  # looks at the record


class Following:
    """One reader of one journal."""

    def __init__(self, job: KnownJob, replay: Replay) -> None:
        self.job = job
        self._replay = replay
        self._reader = JournalReader(job.folder)

    def show_all(self) -> None:
        """Show all present entries."""
        self._replay.show(self._reader.entries())
        self._replay.writer.drain()

    def show_last(self, num_lines: int) -> int:
        """Show the present entries, but only the last lines of output; return how many were left out."""
        kept, num_left_out = last_entries(self._reader.entries(), num_lines)
        self._replay.show(kept)
        self._replay.writer.drain()
        return num_left_out

    def step(self, *, waits: bool = True) -> bool:
        """Show new entries, else wait a moment; False once the job has ended and all of it is shown."""
        deadline = time.monotonic() + _LOOK_EVERY_S
        while time.monotonic() < deadline:
            entries = list(self._reader.entries())
            if entries:
                self._replay.show(entries)
                self._replay.writer.drain()
                return True
            if not waits:
                break
            time.sleep(POLL_S)
        self.job = now_of(self.job)
        if self.job.is_live:
            return True
        self._replay.show(self._reader.entries())
        self._replay.writer.drain()
        return False


def now_of(job: KnownJob) -> KnownJob:
    """Return the same job as it is now. If its record was removed meanwhile it is unchanged but has ended,
    and `why` says that more is not known.
    """
    return look_at(job.folder) or KnownJob(folder=job.folder, record=job.record, state="ended", why=REMOVED)


def last_entries(entries: Iterator[Entry], num_lines: int) -> tuple[list[Entry], int]:
    """Return the entries with the last so many lines of output, those with the form of these, and the number
    of lines in front.
    """
    kept: deque[tuple[int, Entry]] = deque()
    setup: dict[str, Entry] = {}
    num_kept = num_left_out = 0
    for one in entries:
        lines = _num_lines(one)
        kept.append((lines, one))
        num_kept += lines
        while kept and num_kept - kept[0][0] >= num_lines:
            num, first = kept.popleft()
            num_kept -= num
            num_left_out += num
            if first[0] in ("h", "b"):
                setup[first[0]] = first
    first_kept = [setup[kind] for kind in ("h", "b") if kind in setup]
    over = num_kept - num_lines
    if kept and over > 0 and kept[0][1][0] == "o":
        num_left_out += over
        kept[0] = (num_lines, _without_first(kept[0][1], over))
    found = [*first_kept, *(one for _, one in kept)]
    if num_left_out and found[0][0] == "h":  # the lines that are gone are in front of those left out
        found[0] = [*found[0][:2], 0, *found[0][3:]]
    return found, num_left_out


def _num_lines(entry: Entry) -> int:
    return str(entry[-1]).count("\n") if entry[0] == "o" else int(entry[0] in ("w", "i", "r"))


def _without_first(entry: Entry, num_lines: int) -> Entry:
    text = "".join(str(entry[-1]).splitlines(keepends=True)[num_lines:])
    return [*entry[:-1], text]


def log_files_of(job: KnownJob, rank: int) -> list[Path]:
    """Return the files that --log_dir keeps of this rank in the last attempt."""
    if not job.record.log_folder:
        return []
    folder = Path(job.record.log_folder) / f"attempt_{job.record.attempt}"
    return sorted(folder.glob(f"rank*{rank}.std*.log"))

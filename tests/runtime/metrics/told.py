"""The launcher's end of the pipe into which workers tell numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dslaunch.runtime.metrics import report as report_module
from dslaunch.runtime.metrics.pipe import process_pipe

READ_BYTES = 1 << 20
# Of an engine's step; all of its time is in one of them, where each step is timed.
PARTS = ("forward_s", "backward_s", "optimizer_s", "comm_s", "data_s", "paused_s")
Rows = list[dict[str, Any]]  # what lines have, those of one rank


def total(rows: Rows, name: str) -> float:
    """The sum of a number over these lines."""
    return sum(row.get(name, 0.0) for row in rows)


def steps_of(rows: Rows) -> Rows:
    """The lines that end a step."""
    return [row for row in rows if "step" in row]


class Reader:
    """It has made the pipe, and reads what is in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "numbers"
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def lines(self) -> dict[int, list[dict[str, Any]]]:
        """Return what is there, by rank."""
        data = b""
        with suppress(BlockingIOError):
            while part := os.read(self._fd, READ_BYTES):
                data += part
        found: dict[int, list[dict[str, Any]]] = {}
        for line in data.splitlines():
            assert len(line) < 4096
            rank, text = line.split(b" ", 1)
            found.setdefault(int(rank), []).append(json.loads(text))
        return found

    def close(self) -> None:
        """Read no more."""
        os.close(self._fd)


@contextmanager
def telling(rank: int, path: str | Path, *, interval_s: float = 0.0) -> Iterator[None]:
    """This process is a worker whose launcher asks for numbers. At the end it tells the rest."""
    names = {
        "DSLAUNCH_METRICS_PIPE": str(path),
        "DSLAUNCH_METRICS_INTERVAL": str(interval_s),
        "DSLAUNCH_METRICS_PROCESS": "",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size() if dist.is_initialized() else rank + 1),
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    _forget()
    try:
        yield
        pipe = process_pipe()
        assert pipe is not None
        pipe.end()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _forget()


def _forget() -> None:
    """What is known once in a process is asked anew."""
    process_pipe.cache_clear()
    report_module._process_steps.cache_clear()
    report_module._step_marker.cache_clear()

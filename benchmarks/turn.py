"""Common part of the ranks of the benchmarks: they do something for each line that they read, and
answer each with one of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Answer = Callable[[int, str], Any]  # takes the number and the words of a line; returns a NamedTuple


def serve(prepare: Callable[[], Answer]) -> None:
    """Be one rank, until there are no more lines.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # tools print
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    answer = prepare()
    for number, line in enumerate(sys.stdin):
        print(json.dumps(answer(number, line.strip())._asdict()), file=answers, flush=True)
    dist.destroy_process_group()


def timed(action: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done it."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def start_of_peak() -> int:
    """Forget the peak of this process's memory; return the bytes that it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return bytes_of("VmRSS")


def bytes_of(field: str) -> int:
    """A size in /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")

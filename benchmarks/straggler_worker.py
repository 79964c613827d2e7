"""A rank that trains as if: it sleeps where it would compute, averages real gradients over gloo, and tells
its times as an engine does. One rank may compute, or wait for its data, by a part of the step longer.

    straggler_worker.py SECONDS MEGABYTES KIND RANK
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist

FORWARD_S, BACKWARD_S, OPTIMIZER_S, DATA_S = 0.04, 0.04, 0.01, 0.01
LONGER_S = 0.3 * (FORWARD_S + BACKWARD_S + OPTIMIZER_S + DATA_S)
MAX_THREADS = 1


class Teller:
    """Writes sums of times into the pipe of the agent, once in an interval."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._path = os.environ["DSLAUNCH_METRICS_PIPE"]
        self._every_s = float(os.environ["DSLAUNCH_METRICS_INTERVAL"])
        self._sums: dict[str, float] = {}
        self._next_at = 0.0

    def add(self, **numbers: float) -> None:
        for name, value in numbers.items():
            self._sums[name] = self._sums.get(name, 0) + value
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + self._every_s
            with contextlib.suppress(OSError):  # not there yet, or full: it is told the next time
                self._tell()

    def _tell(self) -> None:
        pipe = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, f"{self._rank} {json.dumps(self._sums)}\n".encode())
        finally:
            os.close(pipe)
        self._sums = {}


def nap(seconds: float) -> float:
    """Return how long it was."""
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began


def main() -> None:
    """Train for so long."""
    seconds, megabytes, kind, slow_rank = sys.argv[1:]
    torch.set_num_threads(MAX_THREADS)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    longer_s = LONGER_S if rank == int(slow_rank) else 0.0
    forward_s = FORWARD_S + longer_s * (kind == "compute")
    data_s = DATA_S + longer_s * (kind == "data")
    grads = torch.ones(int(float(megabytes) * 1e6 / 4))
    goes_on = torch.ones(1)
    teller = Teller(rank)
    dist.barrier()
    end = time.monotonic() + float(seconds)
    last = time.perf_counter()
    while goes_on.item():
        times = {"data_s": nap(data_s), "forward_s": nap(forward_s), "backward_s": nap(BACKWARD_S)}
        began = time.perf_counter()
        dist.all_reduce(grads)
        goes_on.fill_(float(time.monotonic() < end))
        dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
        comm_s = time.perf_counter() - began
        times["optimizer_s"] = nap(OPTIMIZER_S)
        now = time.perf_counter()
        teller.add(steps=1, step_s=now - last, comm_s=comm_s, **times)
        last = now
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What a rank of bench_parallel.py does: it trains some steps for each line that it reads, and answers each
line with one of JSON, a Turn.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Step = Callable[[Any], Any]  # one step on a batch; returns the loss, a number or a tensor of one element


class Turn(NamedTuple):
    """What some steps took."""

    s: float  # per step
    loss: float  # of the last one, on this rank
    memory_mb: float  # resident at most so far, of the rank that has most


def serve(make_step: Callable[[], Step], batches: Callable[[int], Sequence[Any]]) -> None:
    """Be one rank, until there are no more lines. `batches` gives those of a turn, which are counted from 0.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # tools print
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    step = make_step()
    for number, _ in enumerate(sys.stdin):
        print(json.dumps(take_turn(step, batches(number))._asdict()), file=answers, flush=True)
    dist.destroy_process_group()


def take_turn(step: Step, batches: Sequence[Any]) -> Turn:
    """Train on them."""
    dist.barrier()
    began = time.perf_counter()
    losses = [step(batch) for batch in batches]
    dist.barrier()
    took_s = time.perf_counter() - began
    memory_mb = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    dist.all_reduce(memory_mb, dist.ReduceOp.MAX)
    return Turn(took_s / len(batches), float(losses[-1]), memory_mb.item())

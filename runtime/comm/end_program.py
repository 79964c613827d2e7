"""The end of a program after its first steps, for runs that need no more of it."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from .wire import before_unwired


def end_program() -> None:
    """End this process, with the exit code 0, when all ranks have come here.

    Not by SystemExit: programs catch it, and do more at their end than such a run needs.
    Order: a collective
    """
    device = "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else "cpu"
    before_unwired()
    dist.all_reduce(torch.zeros(1, device=device))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)

"""What a worker of this folder is: cases in sequence on every rank, with one process and with two.

The ranks are forked from a process that has imported the worker, since imports take longer than all of its
cases. Started as a rank, by dslaunch or torchrun, a worker is that rank: `dslaunch --num_gpus 2
peft_worker.py FOLDER [CASE ...]`. Otherwise `python peft_worker.py [--world_size=N ...] FOLDER [CASE ...]`
forks N ranks, for each N.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

Case = Callable[[Path], dict[str, Any]]
"""Takes the folder of its job; returns what it has found, as JSON holds it."""


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def rank() -> int:
    return int(os.environ["RANK"])


def wait() -> None:
    """Wait for the other ranks, to read what rank 0 has written.

    The first call starts the process group for all cases.

    Errors: RuntimeError if a rank is gone
    """
    if world_size() > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    if dist.is_initialized():
        dist.barrier()


def main(cases: Mapping[str, Case]) -> None:
    """Run all cases, or those that are named behind the folder.

    Each rank writes FOLDER/<world size>/<rank>.json after each case.
    """
    given = [one for one in sys.argv[1:] if not one.startswith("--local_rank=")]
    sizes = [int(one.partition("=")[2]) for one in given if one.startswith("--world_size=")] or [1, 2]
    given = [one for one in given if not one.startswith("--")]
    folder, wanted = Path(given[0]), given[1:] or list(cases)
    if "RANK" in os.environ:
        _run(cases, wanted, folder)
        return
    deepspeed.initialize  # noqa: B018  (reads the engine's modules, before the fork)
    ranks = [_fork(cases, wanted, folder, one) for size in sizes for one in _environments(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    raise SystemExit(max(codes, key=abs))


def _environments(size: int) -> list[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        {
            "RANK": str(one),
            "LOCAL_RANK": str(one),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for one in range(size)
    ]


def _fork(cases: Mapping[str, Case], wanted: Sequence[str], folder: Path, environment: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(environment)
    code = 1
    try:
        _run(cases, wanted, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:  # nothing of the parent's is ended twice
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(cases: Mapping[str, Case], wanted: Sequence[str], folder: Path) -> None:
    """A case that fails is a traceback in what was found.

    Another rank may wait for this one then, so a job of several ends.
    """
    torch.set_num_threads(1)
    gc.freeze()  # the libraries' own objects are many, and a case collects garbage more than once
    folder = folder / str(world_size())
    folder.mkdir(parents=True, exist_ok=True)
    wait()
    environment = dict(os.environ)
    path = folder / f"{rank()}.json"
    found: dict[str, Any] = {}
    for name in wanted:
        begun_at = perf_counter()
        os.environ.update(environment)  # Lightning takes parts of it away at the end of a training
        try:
            found[name] = cases[name](folder)
            found[name]["seconds"] = perf_counter() - begun_at
        except Exception:
            found[name] = {"failure": traceback.format_exc()}
        path.write_text(json.dumps(found))
        if "failure" in found[name] and dist.is_initialized() and dist.get_world_size() > 1:
            return
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()

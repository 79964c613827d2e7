"""Direct reads and writes of one file: dslaunch's disk engine beside fio and DeepSpeed's aio, in one run.

    python benchmarks/bench_disk.py [folder on the disk to measure]

Each number is the best of several rounds in which the three take turns, in GB/s. All move one preallocated
file of 1 GiB in blocks of 1 MiB with 8 on their way: dslaunch by 8 threads, fio by libaio with --iodepth=8
--direct=1, DeepSpeed by queue_depth 8 and, beside it, by intra_op_parallelism 8. Ours / theirs above 1 means
dslaunch is faster.

fio: `apt-get install fio`. DeepSpeed: the one of `make setup`; it compiles its extension at first use, which
takes minutes, and needs libaio-dev. What is missing is said and left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from dslaunch.kernels.disk import DiskEngine, aligned_empty

FILE_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20
NUM_IN_FLIGHT = 8
NUM_ROUNDS = 5
BUILD_TIMEOUT_S = 1200
GOAL_OF_FIO = 0.9
DEEPSPEED = Path(sys.prefix) / "deepspeed"

# Reads words `write <path>` and `read <path>`, answers each with the seconds it took.
DEEPSPEED_WORKER = f"""
import os, sys, time
sys.path.insert(0, {str(DEEPSPEED)!r})
os.environ["DS_ACCELERATOR"] = "cpu"
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # its builder prints
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
handle = AsyncIOBuilder().load().aio_handle({BLOCK_BYTES}, {NUM_IN_FLIGHT}, False, True, int(sys.argv[1]))
array = handle.new_cpu_locked_tensor({FILE_BYTES}, torch.empty(0, dtype=torch.uint8))
array.fill_(1)
print("ready", file=answers)
for line in sys.stdin:
    what, path = line.split()
    began = time.perf_counter()
    (handle.sync_pwrite if what == "write" else handle.sync_pread)(array, path, 0)
    print(time.perf_counter() - began, file=answers)
"""

Mover = Callable[[str, Path], float]  # "write" or "read", a file; the seconds it took


@contextmanager
def ours() -> Iterator[Mover]:
    array = torch.from_dlpack(aligned_empty(FILE_BYTES)).fill_(1)
    with DiskEngine(num_threads=NUM_IN_FLIGHT, block_bytes=BLOCK_BYTES) as engine:

        def move(what: str, path: Path) -> float:
            with engine.open(path) as file:
                began = time.perf_counter()
                (file.write(array) if what == "write" else file.read(array)).wait()
                return time.perf_counter() - began

        yield move


def fio(what: str, path: Path) -> float:
    done = subprocess.run(
        [
            "fio",
            "--name=one",
            f"--filename={path}",
            f"--rw={what}",
            f"--size={FILE_BYTES}",
            f"--bs={BLOCK_BYTES}",
            f"--iodepth={NUM_IN_FLIGHT}",
            "--ioengine=libaio",
            "--direct=1",
            "--overwrite=1",
            "--output-format=json",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    (job,) = json.loads(done.stdout)["jobs"]
    return FILE_BYTES / float(job[what]["bw_bytes"])


@contextmanager
def deepspeed(num_threads: int) -> Iterator[Mover | str]:
    """Yield its engine in a process of its own, or why there is none."""
    with tempfile.TemporaryFile("w+") as said:  # no pipe: the output of a build does not fit in one
        worker = subprocess.Popen(
            [sys.executable, "-c", DEEPSPEED_WORKER, str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        patience = threading.Timer(BUILD_TIMEOUT_S, worker.kill)
        patience.start()
        try:
            mover = _mover(worker)
            patience.cancel()
            yield mover or _last_line(said)
        finally:
            patience.cancel()
            worker.kill()
            worker.communicate()


def _mover(worker: subprocess.Popen[str]) -> Mover | None:
    stdin, stdout = worker.stdin, worker.stdout
    if stdin is None or stdout is None or stdout.readline() != "ready\n":
        return None

    def move(what: str, path: Path) -> float:
        stdin.write(f"{what} {path}\n")
        stdin.flush()
        return float(stdout.readline())

    return move


def _last_line(said: IO[str]) -> str:
    said.seek(0)
    return said.read().strip().rpartition("\n")[2] or "it ended without a word"


def measure(movers: dict[str, Mover], path: Path) -> dict[str, dict[str, float]]:
    """GB/s by mover and direction."""
    best = {name: {"write": 0.0, "read": 0.0} for name in movers}
    for round_index in range(NUM_ROUNDS + 1):
        for what in ("write", "read"):
            for name, move in movers.items():
                speed = FILE_BYTES / move(what, path) / 1e9
                if round_index > 0:  # the first one writes to fresh space, and wakes everything
                    best[name][what] = max(best[name][what], speed)
    return best


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else os.curdir
    with (
        tempfile.TemporaryDirectory(prefix="bench-disk-", dir=folder) as made,
        ours() as dslaunch,
        deepspeed(1) as one_thread,
        deepspeed(NUM_IN_FLIGHT) as many_threads,
    ):
        path = Path(made).resolve() / "file"
        with DiskEngine(num_threads=1) as engine, engine.create(path, FILE_BYTES) as file:
            print(f"{path.parent}: {file!r}")
        movers: dict[str, Mover] = {"dslaunch": dslaunch}
        if shutil.which("fio"):
            movers["fio"] = fio
        else:
            print("without fio, which is not installed")
        for name, mover in (("DeepSpeed", one_thread), (f"DeepSpeed, {NUM_IN_FLIGHT} threads", many_threads)):
            if isinstance(mover, str):
                print(f"without {name}: {mover}")
            else:
                movers[name] = mover
        speeds_of = measure(movers, path)
    print(f"\n{'GB/s':24}{'write':>8}{'ours/':>8}{'read':>8}{'ours/':>8}")
    for name, speeds in speeds_of.items():
        cells = (f"{speed:8.2f}{speeds_of['dslaunch'][what] / speed:8.2f}" for what, speed in speeds.items())
        print(f"{name:24}{''.join(cells)}")
    print(f"\ngoal: at least {GOAL_OF_FIO} of fio, and no less than DeepSpeed")


if __name__ == "__main__":
    main()

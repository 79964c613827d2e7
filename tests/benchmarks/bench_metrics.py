"""What it costs that engines tell their numbers: the same steps with and without, in turn, in one job.

    python tests/benchmarks/bench_metrics.py [--steps 400] [--sizes small middle]

Two ranks over gloo on this machine, small units, one line a second into a pipe that another process reads. An
engine's steps are told and not told in turn (told, not, not, told), and each step is compared with its
neighbour, so that a busy machine slows both. The median of these ratios is the cost. A machine that does
other things hides a tenth of a percent, so there is the CPU time of the rank's thread, too, in which all of
the cost is: the lower quartile of steps that are told, less that of the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.metrics.step_metrics import StepMetrics

WANTED_RATIO = 1.005
WANTED_SHARE = 0.001  # of a step of
STEP_MS = 100.0
NUM_WARMUP = 10


class Size(NamedTuple):
    """A model of blocks, each of which is a unit."""

    name: str
    depth: int
    width: int
    samples: int  # of a micro batch


SIZES = (Size("small", 12, 64, 64), Size("middle", 16, 512, 256))


class Blocks(nn.Module):
    """Linear layers, one after the other."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


class Switch:
    """Lets an engine tell its numbers, or not."""

    def __init__(self, engine: dslaunch.Engine) -> None:
        self._instruments, self._recorder = engine._instruments, engine._wire.recorder
        self._metrics, self._phases = self._instruments.metrics, self._recorder.phases
        if not isinstance(self._metrics, StepMetrics):
            raise AssertionError("the engine was not asked for numbers")

    def set(self, is_on: bool) -> None:
        """From the next step on."""
        self._instruments.metrics = self._metrics if is_on else None
        self._instruments._sums_loss = is_on
        self._recorder.phases = self._phases if is_on else None


def measure(rank: int, size: Size, stage: int, num_steps: int, file: str, pipe: str) -> None:
    """Print, on rank 0, what was found."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", DSLAUNCH_METRICS_PIPE=pipe)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    config = {
        "train_micro_batch_size_per_gpu": size.samples,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": size.width,
        },
    }
    engine, *_ = dslaunch.initialize(model=Blocks(size.depth, size.width), config=config)
    switch, x = Switch(engine), torch.ones(size.samples, size.width)

    def step(is_on: bool) -> tuple[float, float]:
        switch.set(is_on)
        dist.barrier()
        began, cpu = time.perf_counter(), time.thread_time()
        engine.backward(engine(x).pow(2).mean())
        engine.step()
        return time.perf_counter() - began, time.thread_time() - cpu

    for _ in range(NUM_WARMUP):
        step(True)
    ratios, times_ms, cpu_on_s, cpu_off_s = [], [], [], []
    for number in range(num_steps // 2):
        first = bool(number % 2)
        one, other = step(first), step(not first)
        on, off = (one, other) if first else (other, one)
        ratios.append(on[0] / off[0])
        cpu_on_s.append(on[1])
        cpu_off_s.append(off[1])
        times_ms.append(off[0] * 1e3)
    if rank == 0:
        step_ms = statistics.median(times_ms)
        cost_us = (statistics.quantiles(cpu_on_s)[0] - statistics.quantiles(cpu_off_s)[0]) * 1e6
        ratio = statistics.median(ratios)
        share = cost_us / 1e3 / STEP_MS
        print(
            f"{size.name:7} stage {stage}  step {step_ms:7.2f} ms  ratio {ratio:.4f} (wanted <= "
            f"{WANTED_RATIO})  CPU time {cost_us:6.1f} us a step: {share:.3%} of {STEP_MS:.0f} ms (wanted <= "
            f"{WANTED_SHARE:.1%})",
            flush=True,
        )
    engine.destroy()
    dist.destroy_process_group()


def read(pipe: str) -> None:
    """As an agent does."""
    with open(pipe, "rb") as lines:
        for _ in lines:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sizes", nargs="+", choices=[size.name for size in SIZES], metavar="SIZE")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    for size in (size for size in SIZES if given.sizes is None or size.name in given.sizes):
        for stage in (0, 3):
            with tempfile.TemporaryDirectory() as folder:
                pipe = Path(folder, "numbers")
                os.mkfifo(pipe)
                reader = torch.multiprocessing.get_context("spawn").Process(target=read, args=(str(pipe),))
                reader.start()
                torch.multiprocessing.spawn(  # type: ignore[attr-defined]
                    measure, (size, stage, given.steps, f"{folder}/store", str(pipe)), nprocs=2
                )
                reader.join(10.0)
                if reader.is_alive():
                    reader.kill()


if __name__ == "__main__":
    main()

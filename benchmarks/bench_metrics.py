"""Cost of the numbers that engines tell: the same steps with and without, in turn, in one job.

    python benchmarks/bench_metrics.py [--rounds 5] [--pairs 100] [--sizes middle large]

Two ranks over gloo on this machine, one line a second into a pipe that another process reads. Units have
the size that they have by default; those of "cut" are so small that a step waits some 30 times. Times of
steps of two processes that wait for each other differ by some percent, so the cost is measured where it is:
for some seconds steps are told as in a job, then some are not told, and so on. The cost is the processor's
time inside of the XX stands the ratio of steps that are told and timed to steps that are not told, one
after the other, and of two steps neither of which is told, which is what chance alone makes.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.metrics.step_metrics import StepMetrics

LONG_S, OF_LONG, OF_SHORT = 0.010, 0.003, 0.01  # limits of the cost, as a part of the time of a step
NUM_WARMUP, NUM_NOTHING = 10, 1000
TOLD_S, UNTOLD_S = 4.0, 1.0  # in turn
INTERVAL_S = 1.0  # interval of lines


class Size(NamedTuple):
    """A model of blocks."""

    name: str
    depth: int
    width: int
    samples: int  # samples of a micro batch
    unit: int | None = None  # elements; None: as many as by default


SIZES = (
    Size("tiny", 2, 64, 16),
    Size("small", 4, 192, 64),
    Size("cut", 12, 64, 64, 64),
    Size("middle", 16, 512, 256),
    Size("large", 16, 1024, 256),
    Size("long", 16, 1024, 768),
)


class Took(NamedTuple):
    """A step: how long it was, and the processor's time inside of the calls that tell."""

    step_s: float
    inside_s: float
    is_timed: bool
    has_line: bool


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
        metrics, phases = self._instruments.metrics, self._recorder.phases
        if not isinstance(metrics, StepMetrics) or phases is None:
            raise AssertionError("the engine was not asked for numbers")
        self._metrics, self._phases = metrics, phases
        self._seconds, self._is_inside, self._due_at = 0.0, False, 0.0
        self._nothing_s = 0.0  # what the clock says of a call that does nothing
        nothing = self._timed(lambda: None)
        for _ in range(NUM_NOTHING):
            nothing()
        self._nothing_s, self._seconds = self._seconds / NUM_NOTHING, 0.0
        for where, names in (
            (phases, ("begin_call", "end_call", "begin_wait", "end_wait")),
            (self._instruments, ("forward", "time", "part", "note_loss", "end_optimizer_step")),
        ):
            for name in names:
                setattr(where, name, self._timed(getattr(where, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same, and its time counts, but for that of another one inside of it."""

        def timed(*given: Any, **named: Any) -> Any:
            if self._is_inside:
                return call(*given, **named)
            self._is_inside, began = True, time.thread_time()
            try:
                return call(*given, **named)
            finally:
                self._seconds += time.thread_time() - began - self._nothing_s
                self._is_inside = False

        return timed

    def take(self, began: float, *, is_timed: bool) -> Took:
        """End the step that began then, and return its time."""
        due_at = self._metrics._pipe.due_at
        took = Took(time.perf_counter() - began, self._seconds, is_timed, due_at != self._due_at)
        self._seconds, self._due_at = 0.0, due_at
        return took

    @property
    def is_timed(self) -> bool:
        """Whether the next step is."""
        return self._recorder.phases is not None and self._phases.is_timed

    def set(self, *, is_on: bool, is_timed: bool | None = None) -> None:
        """From the next step on. What has passed since the last step that was told is left out."""
        if is_on and self._recorder.phases is None and self._phases._marks:
            del self._phases._marks[:-1]
            self._phases._marks[0].at = time.perf_counter()
            self._metrics._pipe.due_at = self._due_at = time.monotonic() + INTERVAL_S
        self._instruments.metrics = self._metrics if is_on else None
        self._instruments._sums_loss = is_on
        self._recorder.phases = self._phases if is_on else None
        if is_timed is not None:
            self._phases.is_timed = is_timed


def measure(rank: int, size: Size, stage: int, num_rounds: int, num_pairs: int, file: str, pipe: str) -> None:
    """Measure, and print the results on rank 0."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", DSLAUNCH_METRICS_PIPE=pipe)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    config = {
        "train_micro_batch_size_per_gpu": size.samples,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            **({} if size.unit is None else {"reduce_bucket_size": size.unit}),
        },
    }
    engine, *_ = dslaunch.initialize(model=Blocks(size.depth, size.width), config=config)
    switch, x = Switch(engine), torch.ones(size.samples, size.width)

    def step() -> Took:
        is_timed = switch.is_timed
        dist.barrier()
        began = time.perf_counter()
        engine.backward(engine(x).pow(2).mean())
        engine.step()
        return switch.take(began, is_timed=is_timed)

    def steps_for(seconds: float) -> list[Took]:
        """Run so many seconds of steps on all ranks."""
        end, goes_on, steps = time.perf_counter() + seconds, torch.ones(1), []
        while goes_on.item():
            steps.append(step())
            goes_on.fill_(float(time.perf_counter() < end))
            dist.broadcast(goes_on, 0)
        return steps

    for _ in range(NUM_WARMUP):
        step()
    switch.take(0.0, is_timed=False)
    told: list[Took] = []
    untold: list[Took] = []
    steps_for(2 * INTERVAL_S)  # now it is known what they cost
    for _ in range(num_rounds):
        switch.set(is_on=True)
        told += steps_for(TOLD_S)
        switch.set(is_on=False)
        untold += steps_for(UNTOLD_S)
    pairs: dict[str, list[Took]] = {"timed": [], "untold": [], "again": []}
    for number in range(num_pairs):
        names = list(pairs)
        for name in (*names[number % 3 :], *names[: number % 3]):
            switch.set(is_on=name == "timed", is_timed=True if name == "timed" else None)
            pairs[name].append(step())
    if rank == 0:
        say(size, stage, told, untold, pairs)
    switch.set(is_on=True)
    engine.destroy()
    dist.destroy_process_group()


def say(size: Size, stage: int, told: list[Took], untold: list[Took], pairs: dict[str, list[Took]]) -> None:
    """Print the results."""

    def cost_s(steps: list[Took]) -> float:
        return _inside_s(steps) - nothing_s if steps else math.nan

    nothing_s, step_s = _inside_s(untold), statistics.fmean(one.step_s for one in told)
    timed = [one for one in told if one.is_timed]
    plain = [one for one in timed if not one.has_line]
    other = [one for one in told if not one.is_timed and not one.has_line]
    line = [one for one in timed if one.has_line]
    print(
        f"{size.name:7} stage {stage}  step {step_s * 1e3:7.2f} ms  telling {cost_s(told) / step_s:.3%} "
        f"of the time (goal {OF_LONG if step_s >= LONG_S else OF_SHORT:.1%}): {cost_s(plain) * 1e6:5.1f} us "
        f"a timed step, which {len(timed) / len(told):.0%} are, {cost_s(other) * 1e6:4.1f} us another one, "
        f"{(cost_s(line) - cost_s(plain)) * 1e6:5.1f} us a line",
        flush=True,
    )
    if pairs["timed"]:
        ratio, by_chance = (_ratio(pairs[name], pairs["untold"]) for name in ("timed", "again"))
        print(f"{'':16} ratio of timed steps {ratio}, by chance {by_chance}", flush=True)


def _inside_s(steps: Iterable[Took]) -> float:
    """The mean."""
    return statistics.fmean(one.inside_s for one in steps)


def _ratio(ones: list[Took], others: list[Took]) -> str:
    """Return the ratio of a step to its neighbour, so that a busy machine slows both: the median, and its
    range with 95 % certainty, which lies between two ranks of the sorted ratios whatever their
    distribution.
    """
    ratios = sorted(one.step_s / other.step_s for one, other in zip(ones, others, strict=True))
    half = 0.98 * len(ratios) ** 0.5
    low = ratios[max(0, round(len(ratios) / 2 - half) - 1)]
    high = ratios[min(len(ratios) - 1, round(len(ratios) / 2 + half))]
    return f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})"


def read(pipe: str) -> None:
    """Read the pipe as an agent does."""
    with open(pipe, "rb") as lines:
        for _ in lines:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="of told and untold steps")
    parser.add_argument("--pairs", type=int, default=100, help="of steps, whose ratio is printed")
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
                    measure, (size, stage, given.rounds, given.pairs, f"{folder}/store", str(pipe)), nprocs=2
                )
                reader.join(10.0)
                if reader.is_alive():
                    reader.kill()


if __name__ == "__main__":
    main()

"""A rank of bench_stragglers.py. It trains as if: it sleeps where it would compute, averages real gradients
over gloo, and tells its times as an engine does. One rank may compute, or wait for its data, by a part of the
step longer.

    straggler_worker.py SECONDS KIND RANK [engine]

With `engine` it trains with one, in steps so short that only some of them are timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

FORWARD_S, BACKWARD_S, OPTIMIZER_S, DATA_S = 0.04, 0.04, 0.01, 0.01
ENGINE_FORWARD_S, ENGINE_BACKWARD_S, ENGINE_DATA_S = 0.012, 0.015, 0.003
LONGER = 0.3  # part of a step
MEGABYTES = 4.0  # size of the gradients
WIDTH = 64


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
            with contextlib.suppress(OSError):  # the pipe is not there yet, or full: the next line tells it
                self._tell()

    def _tell(self) -> None:
        pipe = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, f"{self._rank} {json.dumps(self._sums)}\n".encode())
        finally:
            os.close(pipe)
        self._sums = {}


def nap(seconds: float) -> float:
    """Sleep, and return for how long."""
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began


class Slow(nn.Module):
    """Module whose forward and backward take so long."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self._forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._forward_s)
        output: Tensor = self.layers(x)
        if output.requires_grad:
            output.register_hook(lambda _: time.sleep(ENGINE_BACKWARD_S))
        return output.pow(2).mean()


def train(seconds: float, kind: str, longer: float) -> None:
    """Train without a model: compute, wait and send as training does."""
    dist.init_process_group("gloo")
    longer_s = longer * (FORWARD_S + BACKWARD_S + OPTIMIZER_S + DATA_S)
    forward_s = FORWARD_S + longer_s * (kind == "compute")
    data_s = DATA_S + longer_s * (kind == "data")
    grads = torch.ones(int(MEGABYTES * 1e6 / 4))
    goes_on = torch.ones(1)
    teller = Teller(dist.get_rank())
    dist.barrier()
    end = time.monotonic() + seconds
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


def train_with_engine(seconds: float, kind: str, longer: float) -> None:
    import dslaunch

    dslaunch.init_distributed("gloo")
    longer_s = longer * (ENGINE_FORWARD_S + ENGINE_BACKWARD_S + ENGINE_DATA_S)
    torch.manual_seed(0)
    model = Slow(ENGINE_FORWARD_S + longer_s * (kind == "compute"))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = dslaunch.initialize(model=model, config=config)
    data_s = ENGINE_DATA_S + longer_s * (kind == "data")
    for _ in range(int(seconds / (ENGINE_FORWARD_S + ENGINE_BACKWARD_S + ENGINE_DATA_S))):
        time.sleep(data_s)
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
    engine.destroy()


def main() -> None:
    """Train for so long."""
    seconds, kind, slow_rank, *more = sys.argv[1:]
    torch.set_num_threads(1)
    longer = LONGER if int(os.environ["RANK"]) == int(slow_rank) else 0.0
    (train_with_engine if more else train)(float(seconds), kind, longer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

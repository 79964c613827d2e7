"""A rank that trains with an engine, in steps so short that only some of them are timed: it sleeps where it
would compute or wait for its data. One rank does so by a part of the step longer.

    straggler_engine_worker.py SECONDS KIND RANK
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dslaunch

FORWARD_S, BACKWARD_S, DATA_S = 0.012, 0.015, 0.003
LONGER_S = 0.3 * (FORWARD_S + BACKWARD_S + DATA_S)
WIDTH = 64


class Slow(nn.Module):
    """Its forward and its backward take so long."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self._forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._forward_s)
        found: Tensor = self.layers(x)
        if found.requires_grad:
            found.register_hook(lambda _: time.sleep(BACKWARD_S))
        return found.pow(2).mean()


def main() -> None:
    """Train for so long."""
    seconds, kind, slow_rank = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dslaunch.init_distributed("gloo")
    longer_s = LONGER_S if dist.get_rank() == slow_rank else 0.0
    torch.manual_seed(0)
    model = Slow(FORWARD_S + longer_s * (kind == "compute"))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = dslaunch.initialize(model=model, config=config)
    data_s = DATA_S + longer_s * (kind == "data")
    for _ in range(int(seconds / (FORWARD_S + BACKWARD_S + DATA_S))):
        time.sleep(data_s)
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

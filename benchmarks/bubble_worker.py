"""One rank of bench_parallel.py: trains layers that sleep, one on each stage, as turn.py says. What a batch
takes is then what its schedule's table says, and what is done beside.

python bubble_worker.py SHAPE SCHEDULE      with any shape
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.turn import Step, serve

MICRO = 8
SLEEP_S = 0.05  # of a forward, of the gradients of inputs, and of those of parameters: that of a real stage


class _Slow(torch.autograd.Function):
    """Takes its time in the forward, and for the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return grad


class _SlowWeight(torch.autograd.Function):
    """Takes its time for the gradient of a parameter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return grad


class Sleeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:  # the first stage takes as long as the others
            x = x.detach().requires_grad_()
        slow: Tensor = _Slow.apply(x)  # type: ignore[no-untyped-call]
        weight: Tensor = _SlowWeight.apply(self.weight)  # type: ignore[no-untyped-call]
        return slow * weight


def sleeping(schedule: str) -> Step:
    """One layer a stage."""
    import dslaunch
    from dslaunch.runtime.pipeline.schedule import shape_of

    shape = shape_of(schedule, num_ranks=dist.get_world_size(), per_rank=None)
    module = dslaunch.PipelineModule(
        [Sleeps() for _ in range(shape.num_stages)],
        shape.num_ranks,
        loss_fn=lambda out, y: out.sum(),
        partition_method="uniform",
        schedule=schedule,
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    engine: Any = dslaunch.initialize(model=module, config=config)[0]
    batch = [(torch.ones(2, 4), torch.zeros(1)) for _ in range(MICRO)]
    return lambda _: engine.train_batch(iter(batch)).item()


def main(schedule: str) -> None:
    serve(lambda: sleeping(schedule), lambda _: [None])


if __name__ == "__main__":
    main(sys.argv[2])

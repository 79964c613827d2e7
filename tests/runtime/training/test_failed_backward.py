"""A job under `dslaunch` in which the backward of one rank raises, while the other waits for
it in a collective.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.local_job import Job

SCRIPT = """
import torch
from torch import nn

import dslaunch


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if engine.global_rank == 1 and engine.global_steps == 1:
            raise ValueError("the backward of rank 1")
        return grad


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = Breaks.apply(block(x))
        return x


config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": STAGE, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1,
                          "stage3_prefetch_bucket_size": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
engine = dslaunch.initialize(model=Model(), config=config)[0]
for _ in range(3):
    engine.backward(engine(torch.ones(4, 8)).pow(2).mean())
    engine.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_the_rank_whose_backward_raised_is_the_one_that_failed_first(stage: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("STAGE", str(stage)))
    job = Job(tmp_path, ["--num_gpus=2", "train.py"])
    try:
        assert job.wait(90) == 1, job.err
    finally:
        job.end()
    assert "it failed first" in job.err
    assert job.err.index("rank 1 on localhost (") < job.err.index("it failed first")
    assert "ValueError: the backward of rank 1" in job.err
    assert "it hangs" not in job.out + job.err

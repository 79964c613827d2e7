"""The first backward of a run takes little more memory than later ones: units are averaged by a guess of the
order that the ranks have not learnt yet.
"""

from __future__ import annotations

import pytest
import torch

import dslaunch
from tests.runtime.models import Blocks, make_config
from tests.runtime.ranks import Ranks

WIDTH, DEPTH = 64, 16
UNIT_BYTES = 2 * WIDTH * (WIDTH + 1)  # the whole gradients of a unit, in bfloat16


def _peaks(rank: int, stage: int) -> list[int]:
    """The most memory that each backward takes, of two micro batches in each step."""
    torch.manual_seed(0)
    config = make_config(
        stage=stage, reduce_bucket_size=1, bf16={"enabled": True}, gradient_accumulation_steps=2
    )
    engine, *_ = dslaunch.initialize(model=Blocks(WIDTH, DEPTH), config=config)
    own = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=engine.device)
    peaks = []
    for _ in range(6):
        loss = engine(own).float().pow(2).mean()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.backward(loss)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        engine.step()
    engine.destroy()
    return peaks


@pytest.mark.parametrize("stage", [2, 3])
def test_a_first_backward_holds_a_few_units_whole_gradients_as_later_ones_do(
    cuda_ranks: Ranks, stage: int
) -> None:
    for peaks in cuda_ranks(_peaks, stage, world_size=2):
        assert max(peaks) - peaks[-1] <= 3 * UNIT_BYTES

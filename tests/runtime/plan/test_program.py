"""What a rehearsal tells of the model that was trained."""

from __future__ import annotations

from torch import nn

import dslaunch
from dslaunch.runtime.plan.program import Rehearsal


def test_the_sizes_of_a_model_are_those_of_its_first_engine() -> None:
    rehearsal = Rehearsal.__new__(Rehearsal)  # a whole one replaces what this process computes with
    rehearsal.engines = []
    assert rehearsal.described() == {}
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = dslaunch.initialize(model=model, config=config)
    rehearsal.engines = [engine]
    assert rehearsal.described() == {
        "num_trained": 8 * 2 + 2,
        "num_frozen": 4 * 8 + 8,
        "stage": 1,
        "micro_batch_size": 2,
        "num_micro_batches": 3,
    }
    engine.destroy()

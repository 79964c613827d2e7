"""Pipelines on the fake CUDA device, whose streams and memory are watched: as one process trains."""

from __future__ import annotations

from typing import Any

import pytest

import dslaunch
from dslaunch.runtime.pipeline.module import PipelineModule
from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.pipeline.models import Judge, data, loss_fn, specs, take_values, train_alone
from tests.runtime.pipeline.test_train import MICRO, SIZE, STEPS, Trained, check, config_of, pairs
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.slow


def _train(rank: int, schedule: str, stage: int, is_tied: bool) -> Trained:
    module = PipelineModule(
        specs(is_tied=is_tied), 2, loss_fn=loss_fn, partition_method="uniform", schedule=schedule
    )
    take_values(module, Judge(is_tied=is_tied))
    engine: Any
    engine, *_ = dslaunch.initialize(model=module, config=config_of(stage, MICRO))
    losses, norms = [], []
    for step in range(STEPS):
        batch = [one.cuda() for one in data(step, size=SIZE * MICRO * engine.dp_world_size)]
        losses.append(engine.train_batch(pairs(*batch, engine, MICRO)).item())
        norms.append(engine.get_global_grad_norm())
    values = {name: safe_get_full_fp32_param(param).cpu() for name, param in module.named_parameters()}
    engine.destroy()
    return losses, norms, values


@pytest.mark.parametrize(
    ("schedule", "stage", "is_tied"),
    [
        ("1f1b", 0, False), ("1f1b", 1, True), ("gpipe", 1, False), ("interleaved", 1, True),
        ("zero_bubble", 1, False), ("zbv", 0, True), ("dualpipev", 1, False),
    ],
)  # fmt: skip
def test_stages_train_as_one_process(cuda_ranks: Ranks, schedule: str, stage: int, is_tied: bool) -> None:
    wanted = train_alone(Judge(is_tied=is_tied), [data(step, size=SIZE * MICRO) for step in range(STEPS)])
    check(cuda_ranks(_train, schedule, stage, is_tied, world_size=2), wanted)

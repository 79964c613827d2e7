"""Models in stages, trained as one process trains the whole: losses, norms and every parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.models import make_config
from tests.runtime.pipeline.models import CLIP, Judge, data, loss_fn, specs, take_values, train_alone
from tests.runtime.ranks import Ranks

STEPS, MICRO = 2, 4
SIZE = 2  # samples of a micro batch
Trained = tuple[list[float], list[float], dict[str, Tensor]]


def config_of(stage: int, num_micro: int = MICRO, **changes: Any) -> dict[str, Any]:
    settings = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": num_micro,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        **changes,
    }
    config = make_config(stage=stage, reduce_bucket_size=50, **settings)
    config.pop("train_batch_size", None)
    return config


def pairs(inputs: Tensor, labels: Tensor, engine: Any, num_micro: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro batches of a batch."""
    place, parts = engine.grid.get_data_parallel_id(), engine.dp_world_size
    mine = zip(
        inputs.chunk(parts)[place].chunk(num_micro), labels.chunk(parts)[place].chunk(num_micro), strict=True
    )
    return iter(list(mine))


def train(
    rank: int,
    num_stages: int,
    schedule: str,
    stage: int,
    is_tied: bool,
    num_micro: int,
    changes: dict[str, Any],
) -> Trained:
    torch.manual_seed(rank)
    module = PipelineModule(
        specs(is_tied=is_tied), num_stages, loss_fn=loss_fn, partition_method="uniform", schedule=schedule
    )
    if module.mpu().get_data_parallel_id() == 0:  # the others take theirs
        take_values(module, Judge(is_tied=is_tied))
    engine, *_ = dslaunch.initialize(model=module, config=config_of(stage, num_micro, **changes))
    losses, norms = [], []
    for step in range(STEPS):
        batch = data(step, size=SIZE * num_micro * engine.dp_world_size)
        losses.append(engine.train_batch(pairs(*batch, engine, num_micro)).item())
        norms.append(engine.get_global_grad_norm())
    values = {name: safe_get_full_fp32_param(param) for name, param in module.named_parameters()}
    engine.destroy()
    return losses, norms, values


def check(found: list[Trained], wanted: Trained, tolerance: float = 2e-6) -> None:
    names = set()
    for losses, norms, values in found:
        assert losses == pytest.approx(wanted[0], abs=tolerance)
        assert norms == pytest.approx(wanted[1], rel=tolerance)
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[2][name], atol=2e-6, rtol=1e-5, msg=name)
        names |= set(values)
    assert names == set(wanted[2])


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [("gpipe", 1), ("interleaved", 2), ("zero_bubble", 3), ("zbv", 0), ("dualpipev", 1)],
)
def test_stages_with_a_tied_layer_train_as_one_process(ranks: Ranks, schedule: str, stage: int) -> None:
    """Without one: the table of ways to train, training/test_parity.py."""
    wanted = train_alone(Judge(is_tied=True), [data(step, size=SIZE * MICRO * 2) for step in range(STEPS)])
    check(ranks(train, 2, schedule, stage, True, MICRO, {}, world_size=4), wanted)

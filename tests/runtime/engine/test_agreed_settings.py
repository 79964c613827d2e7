"""Which settings ranks must have in common, by arithmetic alone."""

from __future__ import annotations

from typing import Any

import pytest

from dslaunch.runtime.config import load_config
from dslaunch.runtime.engine.agreed_settings import agreed_settings
from tests.runtime.models import make_config


def _agreed(changes: dict[str, Any]) -> dict[str, Any]:
    return agreed_settings(load_config(make_config(**changes), world_size=1), None)


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 1},
        {"max_skipped_steps": 5},
        {"rerun_outliers": 10},
        {"gradient_clipping": 0.5},
        {"gradient_accumulation_steps": 2},
        {"dataloader_drop_last": True},
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": True}},
        {"communication_data_type": "fp16"},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}},
        {"checkpoint": {"async_save": True}},
        {"pipeline": {"reduce": "micro_batch"}},
        {"use_data_before_expert_parallelism": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_the_training_must_be_the_same_on_all_ranks(changes: dict[str, Any]) -> None:
    assert _agreed(changes) != _agreed({})


def test_how_gradients_of_parts_of_sequences_are_put_together_must_be_the_same() -> None:
    mean, sums = (
        make_config(sequence_parallel_size=2, sequence={"gradient": kind}) for kind in ("mean", "sum")
    )
    assert agreed_settings(load_config(mean, world_size=2), None) != agreed_settings(
        load_config(sums, world_size=2), None
    )


@pytest.mark.parametrize(
    "changes", [{"steps_per_print": 3}, {"wall_clock_breakdown": True}, {"train_batch_size": 24}], ids=str
)
def test_what_a_rank_prints_and_its_batch_are_its_own_affair(changes: dict[str, Any]) -> None:
    assert _agreed(changes) == _agreed({})

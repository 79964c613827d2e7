"""Layers of experts over ranks are trained as one process trains them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch.runtime.errors import ConfigError
from dslaunch.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.exhaustive import few
from tests.runtime.experts.models import (
    Layered,
    Numbers,
    loss_of,
    make_layered,
    set_experts,
    start,
    train,
    train_plain,
)
from tests.runtime.ranks import Ranks

NEAR = 1e-6  # relative: sums of float32 in another order
Size = int | tuple[int, int]


def _near(got: Numbers, expected: Numbers) -> None:
    for (loss, norm), (other_loss, other_norm) in zip(got, expected, strict=True):
        assert loss == pytest.approx(other_loss, rel=NEAR)
        assert norm == pytest.approx(other_norm, rel=NEAR)


def _true_names(engine: Any) -> dict[str, str]:
    """By the name here, the name in the whole model."""
    units = engine._model.units
    found = {}
    for sub_buffer in (one for unit in units for one in unit.sub_buffers):
        for index, member in enumerate(sub_buffer.members):
            found[member.name] = sub_buffer.true_name(index)
    return found


def _trained(
    rank: int, ep_size: Size, stage: int, options: dict[str, Any], changes: dict[str, Any]
) -> tuple[Numbers, dict[str, Tensor]]:
    model = make_layered(rank, ep_size, **options)
    engine = start(model, stage, **changes)
    numbers = train(engine)
    names = _true_names(engine)
    values = {names[name]: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    engine.destroy()
    return numbers, values


TIGHT = {"capacity_factor": 0.7}  # drops tokens, which RTS draws
HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
CASES: list[tuple[Size, int, dict[str, Any], dict[str, Any]]] = [
    *((ep_size, stage, TIGHT, {}) for ep_size in (1, 2, 4) for stage in (0, 1, 2, 3)),
    *((ep_size, stage, {"k": 2, "use_residual": True}, {}) for ep_size in (2, 4) for stage in (0, 2, 3)),
    *((2, stage, {"k": 3, "drop_tokens": False}, {}) for stage in (1, 3)),
    *((ep_size, stage, TIGHT, HOST) for ep_size in (2, 4) for stage in (1, 2, 3)),
    *(((2, 4), stage, {}, {}) for stage in (1, 3)),
]
KEPT = ((2, 0), (2, 3), (4, 1), (4, 2))


def _is_kept(ep_size: Size, stage: int, options: dict[str, Any], changes: dict[str, Any]) -> bool:
    if changes:
        return (ep_size, stage) == (2, 3)
    if options is TIGHT:
        return (ep_size, stage) in KEPT
    return stage == 3 and ep_size != 4


@pytest.mark.parametrize(("ep_size", "stage", "options", "changes"), few(CASES, _is_kept))
def test_experts_over_ranks_are_trained_as_in_one_process(
    ranks: Ranks, ep_size: Size, stage: int, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    plain = make_layered(0, 1, **options)
    expected = train_plain(plain)
    seen = set()
    for numbers, values in ranks(_trained, ep_size, stage, options, changes, world_size=4):
        _near(numbers, expected)
        for name, value in values.items():
            torch.testing.assert_close(
                value, plain.get_parameter(name).detach(), rtol=2e-6, atol=2e-6, msg=name
            )
            seen.add(name)
    assert seen == {name for name, _ in plain.named_parameters()}

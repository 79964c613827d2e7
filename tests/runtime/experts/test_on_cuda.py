"""Layers of experts over ranks on the fake CUDA device, whose streams and memory are watched."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.testing import assert_close

from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.experts.models import Numbers, make_layered, start, train, train_plain
from tests.runtime.experts.test_layer import NEAR, _true_names
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.slow

# Without what is drawn: a device draws other numbers than the processor.
KEEPS_ALL: dict[str, Any] = {"k": 2, "drop_tokens": False}


def _trained(
    rank: int, ep_size: int, stage: int, options: dict[str, Any]
) -> tuple[Numbers, dict[str, Tensor]]:
    model = make_layered(rank, ep_size, **options)
    engine = start(model, stage)
    numbers = train(engine)
    names = _true_names(engine)
    values = {names[name]: safe_get_full_fp32_param(param).cpu() for name, param in model.named_parameters()}
    engine.destroy()
    return numbers, values


@pytest.mark.parametrize(
    ("ep_size", "stage", "options"),
    [(1, 1, {}), (2, 0, {}), (2, 1, {}), (2, 2, {}), (2, 3, {}), (2, 2, {"use_residual": True})],
)
def test_experts_are_trained_as_in_one_process(
    cuda_ranks: Ranks, ep_size: int, stage: int, options: dict[str, Any]
) -> None:
    options = KEEPS_ALL | options
    plain = make_layered(0, 1, **options)
    expected = train_plain(plain, world_size=2)
    for numbers, values in cuda_ranks(_trained, ep_size, stage, options, world_size=2):
        for found, wanted in zip(numbers, expected, strict=True):
            assert found == pytest.approx(wanted, rel=4 * NEAR)
        for name, value in values.items():
            assert_close(value, plain.get_parameter(name).detach(), rtol=4e-6, atol=4e-6, msg=name)

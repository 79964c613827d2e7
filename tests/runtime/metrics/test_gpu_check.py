"""What `dslaunch check --gpu` starts on each slot, on a device that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dslaunch.runtime.metrics import gpu_check
from tests.runtime.ranks import Ranks

SIZE = 64


def _measured(rank: int) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_check, "ENOUGH_S", 0.001)
        patch.setenv("LOCAL_RANK", str(rank))
        return gpu_check._measured(SIZE)


def test_a_good_gpu_multiplies_right_and_its_speeds_are_told(cuda_ranks: Ranks) -> None:
    for told in cuda_ranks(_measured, world_size=2):
        assert told["problem"] == ""
        assert told["num_wrong"] == 0
        assert told["name"]
        assert all(told[key] > 0 for key in ("flops_per_s", "copied_bytes_per_s", "loaded_bytes_per_s"))


@pytest.mark.parametrize("place", [(0, 0), (17, 5), (31, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_element_is_seen(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, place: tuple[int, int]
) -> None:
    """As a GPU that computes wrong in one of its two precisions."""
    multiply = torch.Tensor.__matmul__

    def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        if product.dtype == dtype:
            product[place] += 8
        return product

    assert gpu_check._num_wrong(torch.device("cpu"), SIZE) == 0
    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert gpu_check._num_wrong(torch.device("cpu"), SIZE) > 0


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    assert gpu_check._measured(SIZE) == {"problem": "", "name": ""}

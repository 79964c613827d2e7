"""What only Lion promises; the arithmetic of every optimizer is in test_steps.py."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.optimizers import LION, make_arrays

LR = 0.5  # a power of two: the steps below are exact


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize(
    ("grad", "moved"), [(3.0, -LR), (-1e-30, LR), (0.0, 0.0), (-0.0, 0.0), (math.inf, -LR), (-math.inf, LR)]
)
def test_every_element_moves_by_lr_against_the_sign(grad: float, moved: float, fast: bool) -> None:
    arrays = make_arrays(LION, 70)
    arrays["param"].zero_()
    arrays["exp_avg"].zero_()
    arrays["grad"].fill_(grad)
    LION.run([arrays.under(LION.whole(70, lr=LR))], fast=fast)
    assert arrays["param"].tolist() == [moved] * 70


def test_a_gradient_that_is_no_number_shows_at_once() -> None:
    arrays = make_arrays(LION, 70)
    arrays["grad"][3] = math.nan
    LION.run([arrays.under(LION.whole(70))])
    assert torch.isnan(arrays["param"]).nonzero().tolist() == [[3]]

"""What only SGD promises; the arithmetic of every optimizer is in test_steps.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dslaunch.kernels import SgdShard, sgd_step
from tests.kernels.optimizers import SGD, make_arrays

WITH, WITHOUT, NESTEROV = SGD


def test_without_momentum_no_buffer_is_needed_or_touched() -> None:
    arrays = make_arrays(WITHOUT, 1000)
    before = arrays.clone()
    param = arrays["param"].clone()
    sgd_step([arrays.under(WITHOUT.whole(1000))])
    sgd_step(
        [
            SgdShard(
                param=param,
                grads=[(0, arrays["grad"])],
                momentum_buffer=None,
                segments=WITHOUT.whole(1000),
            )
        ]
    )
    assert torch.equal(param, arrays["param"])
    assert torch.equal(arrays["momentum_buffer"], before["momentum_buffer"])


def test_a_segment_with_momentum_needs_a_buffer() -> None:
    segments = (*WITHOUT.whole(4), replace(*WITH.whole(4), offset=4))
    shard = SgdShard(
        param=torch.zeros(8), grads=[(0, torch.zeros(8))], momentum_buffer=None, segments=segments
    )
    with pytest.raises(ValueError, match="momentum_buffer") as caught:
        sgd_step([shard])
    assert str(caught.value) == (
        "shards[0].momentum_buffer: None, but shards[0].segments[1] has momentum 0.9; pass an array, of "
        "zeros before step 1"
    )


def test_the_buffer_of_the_first_step_is_the_gradient_without_dampening() -> None:
    arrays = make_arrays(WITH, 100)
    arrays["momentum_buffer"].zero_()
    sgd_step([arrays.under(WITH.whole(100, step=1, weight_decay=0.0))])
    assert torch.equal(arrays["momentum_buffer"], arrays["grad"])

"""What only Adam promises; the arithmetic of every optimizer is in test_steps.py."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from dslaunch import kernels
from dslaunch.kernels import AdamShard, adamw_step, optimizers
from tests.kernels.optimizers import ADAM, OPTIMIZERS, make_arrays

ADAM_W, _ = ADAM


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_parameter_that_is_no_number_does_not_reach_the_moments_in_adam_w_mode(bad: float) -> None:
    arrays = make_arrays(ADAM_W, 100)
    arrays["param"][40] = bad
    ADAM_W.run([arrays.under(ADAM_W.whole(100, weight_decay=0.0))])
    assert torch.isfinite(arrays["exp_avg"]).all()
    assert torch.isfinite(arrays["exp_avg_sq"]).all()
    assert (~torch.isfinite(arrays["param"])).nonzero().tolist() == [[40]]


def test_numpy_arrays_serve_as_well_as_tensors() -> None:
    arrays = make_arrays(ADAM_W, 33)
    copies = {name: tensor.numpy().copy() for name, tensor in arrays.tensors.items()}
    grad = copies.pop("grad")
    adamw_step([arrays.under(ADAM_W.whole(33))])
    adamw_step([AdamShard(**copies, grads=[(0, grad)], segments=ADAM_W.whole(33))])
    assert arrays["param"].numpy().tobytes() == copies["param"].tobytes()


def test_a_segment_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        ADAM_W.segment.lr = 1.0


def test_bfloat16_moments_stop_where_the_next_value_is_nearer_to_the_old() -> None:
    """What shard.py warns of: at beta2 = 0.999 a moment of squares loses less than half a unit,
    and keeps its value.
    """
    arrays = make_arrays(ADAM_W, 8, state=torch.bfloat16)
    arrays["grad"].zero_()
    before = arrays.clone()
    adamw_step([arrays.under(ADAM_W.whole(8))])
    assert torch.equal(arrays["exp_avg_sq"], before["exp_avg_sq"])
    adamw_step([arrays.under((replace(ADAM_W.segment, numel=8, beta2=0.9),))])
    assert (arrays["exp_avg_sq"] < before["exp_avg_sq"]).all()


def test_the_public_names_are_those_of_lamb_of_the_norm_and_of_each_elementwise_optimizer() -> None:
    assert sorted(set(kernels.__all__) - set(optimizers.__all__)) == [
        "Kernel",
        "LAMB",
        "LambSegment",
        "LambShard",
        "LambSums",
        "lamb_apply",
        "lamb_directions",
        "lamb_step",
        "lamb_step_reference",
        "squared_norm",
    ]
    assert all(hasattr(kernels, name) for name in kernels.__all__)
    for one in OPTIMIZERS:
        assert {f"{one.kernel.name}{kind}" for kind in ("Segment", "Shard")} <= set(kernels.__all__)

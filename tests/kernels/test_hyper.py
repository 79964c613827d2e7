"""The hyper-parameters and states of each optimizer that are refused;
what all have in common is in test_bindings.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.optimizers import ADAGRAD, ADAM, LAMB, LION, SGD, Optimizer, make_arrays

SEGMENT = "shards[0].segments[0]"
FINITE = "must be finite and >= 0"

BAD: list[tuple[Optimizer, dict[str, Any], type[Exception], str]] = [
    (ADAM[0], {"eps": -1.0}, ValueError, f".eps: -1; {FINITE}"),
    (LION, {"lr": -1.0}, ValueError, f".lr: -1; {FINITE}"),
    (LION, {"beta1": 1.0}, ValueError, ".beta1: 1; must be in [0, 1)"),
    (LION, {"beta2": -0.5}, ValueError, ".beta2: -0.5; must be in [0, 1)"),
    (LION, {"weight_decay": float("nan")}, ValueError, f".weight_decay: nan; {FINITE}"),
    (ADAGRAD, {"lr": float("inf")}, ValueError, f".lr: inf; {FINITE}"),
    (ADAGRAD, {"lr_decay": -1.0}, ValueError, f".lr_decay: -1; {FINITE}"),
    (ADAGRAD, {"eps": -1.0}, ValueError, f".eps: -1; {FINITE}"),
    (ADAGRAD, {"weight_decay": -1.0}, ValueError, f".weight_decay: -1; {FINITE}"),
    (ADAGRAD, {"step": 0}, ValueError, ".step: 0; must be >= 1: the first step is step 1"),
    (SGD[0], {"lr": -1.0}, ValueError, f".lr: -1; {FINITE}"),
    (SGD[0], {"momentum": -0.5}, ValueError, f".momentum: -0.5; {FINITE}"),
    (SGD[0], {"dampening": float("inf")}, ValueError, ".dampening: inf; must be finite"),
    (SGD[0], {"weight_decay": -1.0}, ValueError, f".weight_decay: -1; {FINITE}"),
    (SGD[0], {"step": -1}, ValueError, ".step: -1; must be >= 1: the first step is step 1"),
    (SGD[0], {"nesterov": "yes"}, TypeError, ".nesterov: 'yes'; must be True or False"),
    (SGD[0], {"nesterov": True}, ValueError,
     ".nesterov: True, with momentum 0.9 and dampening 0.3; needs momentum above 0 and dampening 0"),
    (SGD[1], {"nesterov": True, "dampening": 0.0}, ValueError,
     ".nesterov: True, with momentum 0 and dampening 0; needs momentum above 0 and dampening 0"),
    (LAMB[0], {"beta1": 1.0}, ValueError, ".beta1: 1; must be in [0, 1)"),
    (LAMB[0], {"beta2": 1.0}, ValueError, ".beta2: 1; must be in [0, 1)"),
    (LAMB[0], {"eps": -1.0}, ValueError, f".eps: -1; {FINITE}"),
    (LAMB[0], {"step": 0}, ValueError, ".step: 0; must be >= 1: the first step is step 1"),
    (LAMB[0], {"max_coeff": -1.0}, ValueError, f".max_coeff: -1; {FINITE}"),
    (LAMB[0], {"min_coeff": 20.0}, ValueError, ".min_coeff: 20; must not be above max_coeff, 10"),
]  # fmt: skip


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize(
    ("optimizer", "hyper", "error", "message"), BAD, ids=[f"{b[0]}{b[3]}"[:50] for b in BAD]
)
def test_a_hyper_parameter_out_of_range_is_refused_by_name(
    optimizer: Optimizer, hyper: dict[str, Any], error: type[Exception], message: str, fast: bool
) -> None:
    arrays = make_arrays(optimizer, 8)
    with pytest.raises(error) as caught:
        optimizer.run([arrays.under(optimizer.whole(8, **hyper))], fast=fast)
    assert str(caught.value) == SEGMENT + message
    assert torch.equal(arrays["param"], make_arrays(optimizer, 8)["param"])


@pytest.mark.parametrize("optimizer", [LION, ADAGRAD, *SGD, *LAMB], ids=str)
def test_a_state_of_another_dtype_or_length_is_refused(optimizer: Optimizer) -> None:
    name = optimizer.states[0]
    for value, error, message in (
        (torch.zeros(8).half(), TypeError, "dtype float16; must be float32 or bfloat16"),
        (torch.zeros(9), ValueError,
         "9 elements, but shards[0].param has 8; all arrays of one shard must have the same length"),
    ):  # fmt: skip
        arrays = make_arrays(optimizer, 8)
        arrays.tensors[name] = value
        with pytest.raises(error) as caught:
            optimizer.run([arrays.under(optimizer.whole(8))])
        assert str(caught.value) == f"shards[0].{name}: {message}"


def test_the_direction_of_lamb_must_be_float32() -> None:
    arrays = make_arrays(LAMB[0], 8)
    arrays.tensors["update"] = torch.zeros(8).bfloat16()
    with pytest.raises(TypeError) as caught:
        LAMB[0].run([arrays.under(LAMB[0].whole(8))])
    assert str(caught.value) == "shards[0].update: dtype bfloat16; must be float32"

"""What the fused optimizers remember, to and from torch's: the next steps are the same."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dslaunch.ops.adagrad import DeepSpeedCPUAdagrad
from dslaunch.ops.adam import DeepSpeedCPUAdam, FusedAdam
from dslaunch.ops.lamb import FusedLamb
from dslaunch.ops.lion import DeepSpeedCPULion, FusedLion

Make = Callable[[Any], torch.optim.Optimizer]

SHAPES = [(5, 3), (), (4,)]
BEFORE, AFTER = 5, 10
# Ten steps of at most 0.1 beside parameters up to 4, in two float32 programs: 10 * (2 * 4 + 8 * 0.1) * 2^-24.
DRIFT = 10 * (2 * 4 + 8 * 0.1) * 2.0**-24

HYPER: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
OTHER: dict[str, Any] = {
    "lr": 1.0,
    "betas": (0.1, 0.2),
    "eps": 1.0,
    "weight_decay": 0.9,
}  # of who loads: replaced
ADAMS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "FusedAdam": FusedAdam,
    "DeepSpeedCPUAdam": DeepSpeedCPUAdam,
    "torch AdamW": torch.optim.AdamW,
    "torch AdamW foreach": lambda p, **h: torch.optim.AdamW(p, foreach=True, **h),
    "torch AdamW fused": lambda p, **h: torch.optim.AdamW(p, fused=True, **h),
}
L2: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "FusedAdam": lambda p, **h: FusedAdam(p, adam_w_mode=False, **h),
    "DeepSpeedCPUAdam": lambda p, **h: DeepSpeedCPUAdam(p, adamw_mode=False, **h),
    "torch Adam": torch.optim.Adam,
}
ADAGRADS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "DeepSpeedCPUAdagrad": DeepSpeedCPUAdagrad,
    "torch Adagrad": torch.optim.Adagrad,
}


def new_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def changed_over(writer: Make, reader: Make) -> list[nn.Parameter]:
    """Some steps with one optimizer, the rest with another that loads what it remembers."""
    params = new_params()
    first = writer(_groups(params))
    run(first, params, range(BEFORE))
    second = reader(_groups(params))
    second.load_state_dict(through_a_file(first.state_dict()))
    run(second, params, range(BEFORE, AFTER))
    return params


def straight(make: Make) -> list[nn.Parameter]:
    params = new_params()
    run(make(_groups(params)), params, range(AFTER))
    return params


def _groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]


PAIRS = [
    *((ADAMS, left, right, HYPER, OTHER) for left in ADAMS for right in ADAMS),
    *((L2, left, right, HYPER, OTHER) for left in L2 for right in L2),
    *(
        (ADAGRADS, left, right, {"lr": 0.05, "weight_decay": 0.3}, {"lr": 1.0, "eps": 1.0})
        for left in ADAGRADS
        for right in ADAGRADS
    ),
]


@pytest.mark.parametrize(("kinds", "writer", "reader", "hyper", "other"), PAIRS)
def test_another_goes_on_where_one_stopped(
    kinds: dict[str, Callable[..., torch.optim.Optimizer]],
    writer: str,
    reader: str,
    hyper: dict[str, Any],
    other: dict[str, Any],
) -> None:
    expected = straight(lambda params: kinds[writer](params, **hyper))
    found = changed_over(
        lambda params: kinds[writer](params, **hyper), lambda params: kinds[reader](params, **other)
    )
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=DRIFT)


@pytest.mark.parametrize("kind", [FusedLion, DeepSpeedCPULion, FusedLamb])
def test_those_that_torch_lacks_go_on_with_the_same_bits(kind: Callable[..., torch.optim.Optimizer]) -> None:
    expected = straight(lambda params: kind(params, weight_decay=0.1))
    found = changed_over(lambda params: kind(params, weight_decay=0.1), lambda params: kind(params, lr=1.0))
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


def test_the_mode_stays_the_constructors() -> None:
    """As with torch.optim.AdamW, and with DeepSpeed's."""
    params = new_params()
    first = torch.optim.Adam(params, **HYPER)
    run(first, params, range(1))
    for mode in (True, False):
        second = FusedAdam(params, adam_w_mode=mode)
        second.load_state_dict(first.state_dict())
        assert second.adam_w_mode is mode
        assert second.param_groups[0]["decoupled_weight_decay"] is mode
    with pytest.raises(
        ValueError, match="group 1 has decoupled_weight_decay=True, and the constructor said False"
    ):
        second.add_param_group({"params": new_params(), "decoupled_weight_decay": True})


def test_adagrad_has_the_keys_of_torchs_groups() -> None:
    more = {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.2}
    expected, found = new_params(), new_params()
    run(torch.optim.Adagrad(expected, **more), expected, range(AFTER))
    run(DeepSpeedCPUAdagrad([{"params": found, **more}]), found, range(AFTER))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=DRIFT)


def test_what_the_saved_groups_lack_is_as_in_the_constructor() -> None:
    params = new_params()
    first = torch.optim.AdamW(params, **HYPER)
    run(first, params, range(1))
    state = first.state_dict()
    for group in state["param_groups"]:
        group.pop("decoupled_weight_decay", None)  # torch before 2.7
        group["initial_lr"] = 0.5  # a scheduler's
    second = FusedAdam(params, bias_correction=False, **OTHER)
    second.load_state_dict(state)
    (group,) = second.param_groups
    assert group["bias_correction"] is False
    assert group["decoupled_weight_decay"] is True
    assert group["initial_lr"] == 0.5
    assert group["lr"] == HYPER["lr"]
    run(second, params, range(1, 2))


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3.0), torch.tensor(3), None])
def test_steps_may_be_numbers_or_tensors_or_the_groups(count: Any) -> None:
    """Of older torch, of torch, and of DeepSpeed's FusedAdam before 0.14."""
    params = new_params()
    first = FusedAdam(params, **HYPER)
    run(first, params, range(3))
    state = first.state_dict()
    for one in state["state"].values():
        one.pop("step")
        if count is not None:
            one["step"] = count
    if count is None:
        state["param_groups"][0]["step"] = 3
    second = FusedAdam(params)
    second.load_state_dict(state)
    for one in second.state.values():
        assert one["step"].dtype is torch.float32
        assert one["step"].shape == ()
        assert float(one["step"]) == 3.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_full", [True, False])
def test_moments_keep_their_dtype(dtype: torch.dtype, is_full: bool) -> None:
    params = new_params(dtype)
    first = DeepSpeedCPUAdam(params, fp32_optimizer_states=is_full)
    run(first, params, range(2))
    second = DeepSpeedCPUAdam(params, fp32_optimizer_states=is_full)
    second.load_state_dict(through_a_file(first.state_dict()))
    for param in params:
        for name in ("exp_avg", "exp_avg_sq"):
            assert second.state[param][name].dtype is (torch.float32 if is_full else dtype)
            assert torch.equal(second.state[param][name], first.state[param][name])
    theirs = torch.optim.AdamW(params)  # torch makes them 16-bit
    theirs.load_state_dict(first.state_dict())
    run(theirs, params, range(2, 3))
    second.load_state_dict(theirs.state_dict())
    assert second.state[params[0]]["exp_avg"].dtype is (torch.float32 if is_full else dtype)


def test_hooks_see_and_change_what_is_loaded() -> None:
    params = new_params()
    first = FusedAdam(params)
    run(first, params, range(2))
    second = FusedAdam(params)

    def double(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        states = {number: {**one, "exp_avg": one["exp_avg"] * 2} for number, one in state["state"].items()}
        return {**state, "state": states}

    second.register_load_state_dict_pre_hook(double)
    second.load_state_dict(first.state_dict())
    for param in params:
        assert torch.equal(second.state[param]["exp_avg"], first.state[param]["exp_avg"] * 2)


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "group 0 of the state_dict has amsgrad=True"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "group 0 of the state_dict has maximize=True"),
        (
            lambda p: torch.optim.RMSprop(p),
            (
                "the state_dict has step, square_avg of parameter 0, without exp_avg and exp_avg_sq; it "
                "is another optimizer's"
            ),
        ),
    ],
)
def test_what_it_cannot_go_on_with_is_refused_by_name(writer: Make, message: str) -> None:
    params = new_params()
    first = writer(params)
    run(first, params, range(1))
    second = FusedAdam(params, lr=0.5)
    with pytest.raises(ValueError, match=message):
        second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.5
    assert not second.state

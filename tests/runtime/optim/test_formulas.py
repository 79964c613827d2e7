"""Every formula over flat arrays in two ways: our kernels in host memory, and torch's operations, which a GPU gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch.runtime.optim.formulas.adagrad import AdagradFormula
from dslaunch.runtime.optim.formulas.adam import AdamFormula
from dslaunch.runtime.optim.formulas.formula import FlatArrays, Formula, Run
from dslaunch.runtime.optim.formulas.lamb import LambFormula
from dslaunch.runtime.optim.formulas.lion import LionFormula
from dslaunch.runtime.optim.formulas.sgd import SgdFormula

N, CUT = 301, 117  # two groups that meet at an odd place; the last element belongs to none
JOINT = 64  # where one piece of the gradient ends and the next begins
SCALE = 0.37
STEPS = 4
# Two float32 programs of one formula, values up to 4: 4 steps * about 12 roundings * 4 * 2^-24. Seen: 2.4e-7.
ROUNDING = 4 * 12 * 4 * 2.0**-24

BASE: dict[str, Any] = {"weight_decay": 0.3, "eps": 1e-6, "betas": (0.9, 0.99)}
LAMB = {**BASE, "min_coeff": 0.01, "max_coeff": 10.0}
SGD = {"weight_decay": 0.3, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
CASES: dict[str, tuple[Formula, dict[str, Any]]] = {
    "AdamW": (AdamFormula(adam_w_mode=True), BASE),
    "Adam": (AdamFormula(adam_w_mode=False), BASE),
    "AdamW without bias correction": (AdamFormula(adam_w_mode=True), {**BASE, "bias_correction": False}),
    "Lion": (LionFormula(), BASE),
    "Adagrad": (AdagradFormula(), {**BASE, "lr_decay": 0.1}),
    "Lamb": (LambFormula(eps_inside_sqrt=False), LAMB),
    "Lamb eps inside": (LambFormula(eps_inside_sqrt=True), {**LAMB, "bias_correction": False}),
    "SGD": (SgdFormula(), {**SGD, "momentum": 0.0}),
    "SGD momentum": (SgdFormula(), {**SGD, "dampening": 0.2}),
    "SGD nesterov": (SgdFormula(), {**SGD, "nesterov": True}),
}


def _normal(seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def _run(formula: Formula, way: str, group: dict[str, Any], dtype: torch.dtype | None) -> FlatArrays:
    """Two groups over a padded shard, the gradient in two pieces, scaled; `dtype`: of a copy, and of the gradients."""
    groups = [{**group, "lr": 0.1}, {**group, "lr": 0.02, "weight_decay": 0.0}]
    param, states = _normal(0), {name: torch.zeros(N) for name in formula.names_for(groups)}
    joint = JOINT if formula.is_elementwise else CUT  # else every run has its gradient in one piece
    param_out = None if dtype is None else torch.zeros(N, dtype=dtype)
    for step in range(1, STEPS + 1):
        grad = _normal(step) if dtype is None else _normal(step).to(dtype)
        one = FlatArrays(
            param=param,
            grads=((0, grad[:joint]), (joint, grad[joint:])),
            states=states,
            runs=(
                Run(offset=0, numel=CUT, group=groups[0], step=step),
                Run(offset=CUT, numel=N - 1 - CUT, group=groups[1], step=step),
            ),
            param_out=param_out,
        )
        getattr(formula, way)([one], grad_scale=SCALE)
    return one


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_both_ways_do_the_same(name: str, dtype: torch.dtype | None) -> None:
    formula, group = CASES[name]
    ours, torchs = (
        _run(formula, way, group, dtype) for way in ("update_in_host_memory", "update_with_torch")
    )
    torch.testing.assert_close(ours.param, torchs.param, rtol=0, atol=ROUNDING)
    assert ours.states.keys() == torchs.states.keys()
    for state in ours.states:
        torch.testing.assert_close(ours.states[state], torchs.states[state], rtol=1e-6, atol=ROUNDING)
    for side in (ours, torchs):
        assert side.param[N - 1] == _normal(0)[N - 1]  # padding
        assert all(values[N - 1] == 0 for values in side.states.values())
        if side.param_out is not None:
            assert torch.equal(side.param_out[: N - 1], side.param[: N - 1].to(side.param_out.dtype))
            assert side.param_out[N - 1] == 0


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "dampening": 0.2}, {"momentum": 0.9, "nesterov": True}]
)
def test_sgd_is_torchs(options: dict[str, Any]) -> None:
    param, expected = _normal(0), torch.nn.Parameter(_normal(0))
    optimizer = torch.optim.SGD([expected], lr=0.1, weight_decay=0.3, **options)
    formula, group = SgdFormula(), optimizer.param_groups[0]
    states = {name: torch.zeros(N) for name in formula.names_for([group])}
    for step in range(1, 21):
        expected.grad = _normal(step)
        optimizer.step()
        run = Run(offset=0, numel=N, group=group, step=step)
        formula.update([FlatArrays(param=param, grads=((0, _normal(step)),), states=states, runs=(run,))])
    torch.testing.assert_close(param, expected.detach(), rtol=0, atol=20 * 6 * 4 * 2.0**-24)


def test_nothing_to_update_is_no_error() -> None:
    for formula, _ in CASES.values():
        formula.update([])

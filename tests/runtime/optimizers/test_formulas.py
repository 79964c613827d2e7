"""Each optimizer of dslaunch.ops over 20 steps: every element against the formula in float64,
and against torch's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from dslaunch.ops.adagrad import DeepSpeedCPUAdagrad
from dslaunch.ops.adam import DeepSpeedCPUAdam, FusedAdam
from dslaunch.ops.lamb import FusedLamb
from dslaunch.ops.lion import DeepSpeedCPULion, FusedLion
from dslaunch.runtime.optimizers.flatten import step_flat
from dslaunch.runtime.optimizers.formula import Formula
from tests.exhaustive import few
from tests.runtime.optimizers.bounded import Bounded
from tests.runtime.optimizers.reference import (
    AdagradReference,
    AdamReference,
    LambReference,
    LionReference,
    Reference,
)

Make = Callable[[Any], torch.optim.Optimizer]

STEPS = 20
SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 3, 4), (33, 17)]
UNITS = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

# Two float32 programs of one formula, 20 steps of at most lr each beside parameters up to 4: each rounds p
# once or twice and the step about 8 times. Counted: 20 * (2 * 4 + 8 * 0.05) * 2^-24.
TORCH_DRIFT = 20 * (2 * 4 + 8 * 0.05) * 2.0**-24

ADAM = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
LION = {"lr": 0.01, "betas": (0.9, 0.8), "weight_decay": 0.3}
LAMB = {
    "lr": 0.05,
    "betas": (0.8, 0.9),
    "eps": 1e-3,
    "weight_decay": 0.3,
    "max_coeff": 3.0,
    "min_coeff": 0.1,
}
LAMB_MORE = {"eps_inside_sqrt": False, "bias_correction": True}
CASES: dict[str, tuple[Make, type[Reference], dict[str, Any]]] = {
    "FusedAdam": (lambda p: FusedAdam(p, **ADAM), AdamReference, {**ADAM, "decoupled": True}),
    "FusedAdam L2": (
        lambda p: FusedAdam(p, adam_w_mode=False, **ADAM),
        AdamReference,
        {**ADAM, "decoupled": False},
    ),
    "FusedAdam without bias correction": (
        lambda p: FusedAdam(p, bias_correction=False, **ADAM),
        AdamReference,
        {**ADAM, "decoupled": True, "bias_correction": False},
    ),
    "DeepSpeedCPUAdam": (lambda p: DeepSpeedCPUAdam(p, **ADAM), AdamReference, {**ADAM, "decoupled": True}),
    "DeepSpeedCPUAdam L2": (
        lambda p: DeepSpeedCPUAdam(p, adamw_mode=False, **ADAM),
        AdamReference,
        {**ADAM, "decoupled": False},
    ),
    "FusedLion": (lambda p: FusedLion(p, **LION), LionReference, LION),
    "DeepSpeedCPULion": (lambda p: DeepSpeedCPULion(p, **LION), LionReference, LION),
    "DeepSpeedCPUAdagrad": (
        lambda p: DeepSpeedCPUAdagrad(p, lr=0.05, eps=1e-6, weight_decay=0.3),
        AdagradReference,
        {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.3},
    ),
    "FusedLamb": (lambda p: FusedLamb(p, **LAMB), LambReference, {**LAMB, **LAMB_MORE}),
    "FusedLamb eps inside": (
        lambda p: FusedLamb(p, eps_inside_sqrt=True, bias_correction=False, **LAMB),
        LambReference,
        {**LAMB, "eps_inside_sqrt": True, "bias_correction": False},
    ),
}


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def strided(values: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "reversed":  # dense, in another order
        dims = list(range(values.ndim))[::-1]
        return values.permute(dims).contiguous().permute(dims)
    if layout == "spread" and values.ndim:  # every second element of something larger
        wide = torch.zeros(*values.shape[:-1], values.shape[-1] * 2, dtype=values.dtype)
        wide[..., ::2] = values
        return wide[..., ::2]
    return values


def grads(shape: tuple[int, ...], number: int, dtype: torch.dtype) -> Iterator[Tensor]:
    for step in range(STEPS):
        yield normal(shape, 1000 * number + step + 1).to(dtype)


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In host memory, and as on a device."""
    if request.param == "torch":
        monkeypatch.setattr(Formula, "update", Formula.update_with_torch)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("name", "dtype", "way"),
    few(
        itertools.product(CASES, UNITS, ["kernel", "torch"]),
        lambda name, dtype, way: dtype is (torch.bfloat16 if way == "kernel" else torch.float32),
    ),
    indirect=["way"],
    ids=str,
)
def test_every_element_is_the_formula(name: str, dtype: torch.dtype) -> None:
    make, reference, group = CASES[name]
    params = [nn.Parameter(normal(shape, 50 + i).to(dtype)) for i, shape in enumerate(SHAPES)]
    optimizer = make(params)
    references = [reference(Bounded.exact(param), group) for param in params]
    sources = [grads(shape, i, dtype) for i, shape in enumerate(SHAPES)]
    for _ in range(STEPS):
        for param, one, source in zip(params, references, sources, strict=True):
            param.grad = next(source)
            one.step(param.grad)
        optimizer.step()
        for param, one in zip(params, references, strict=True):
            one.param.check(param, unit=UNITS[dtype])
            if dtype is not torch.float32:
                one.param = Bounded.exact(param)  # what is rounded away is gone
            for state, expected in one.states.items():
                kept = optimizer.state[param][state]
                assert kept.dtype is torch.float32
                expected.check(kept)


@pytest.mark.parametrize("layout", ["reversed", "spread"])
@pytest.mark.parametrize("dtype", few(UNITS, lambda dtype: dtype is not torch.float16), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_strides_change_no_bit(name: str, dtype: torch.dtype, layout: str) -> None:
    make = CASES[name][0]
    plain = [nn.Parameter(normal(shape, 50 + i).to(dtype)) for i, shape in enumerate(SHAPES)]
    other = [nn.Parameter(strided(param.detach().clone(), layout)) for param in plain]
    optimizers = [make(plain), make(other)]
    for step in range(3):
        for i, (left, right) in enumerate(zip(plain, other, strict=True)):
            left.grad = normal(SHAPES[i], 100 * i + step).to(dtype)
            right.grad = left.grad if step else strided(left.grad.clone(), layout)
        for optimizer in optimizers:
            optimizer.step()
    for left, right in zip(plain, other, strict=True):
        if name.startswith("FusedLamb"):  # the norms add in another order
            torch.testing.assert_close(left, right, rtol=2 * UNITS[dtype] or 1e-6, atol=1e-6)
        else:
            assert torch.equal(left, right)


@pytest.mark.parametrize(
    "name", ["DeepSpeedCPUAdam", "DeepSpeedCPUAdam L2", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad"]
)
def test_states_of_16_bits_are_rounded_after_each_step(name: str) -> None:
    make = {
        "DeepSpeedCPUAdam": lambda p: DeepSpeedCPUAdam(p, fp32_optimizer_states=False, **ADAM),
        "DeepSpeedCPUAdam L2": lambda p: DeepSpeedCPUAdam(
            p, adamw_mode=False, fp32_optimizer_states=False, **ADAM
        ),
        "DeepSpeedCPULion": lambda p: DeepSpeedCPULion(p, fp32_optimizer_states=False, **LION),
        "DeepSpeedCPUAdagrad": lambda p: DeepSpeedCPUAdagrad(
            p, lr=0.05, eps=1e-6, weight_decay=0.3, fp32_optimizer_states=False
        ),
    }[name]
    _, reference, group = CASES[name]
    param = nn.Parameter(normal((33, 17), 1).bfloat16())
    optimizer = make([param])
    one = reference(Bounded.exact(param), group)
    for grad in grads((33, 17), 3, torch.bfloat16):
        param.grad = grad
        one.step(grad)
        optimizer.step()
        one.param.check(param, unit=UNITS[torch.bfloat16])
        one.param = Bounded.exact(param)
        for state, expected in list(one.states.items()):
            kept = optimizer.state[param][state]
            assert kept.dtype is torch.bfloat16
            expected.check(kept, unit=UNITS[torch.bfloat16])
            one.states[state] = Bounded.exact(kept)


TORCH: dict[str, tuple[Make, Make]] = {
    "AdamW": (lambda p: FusedAdam(p, **ADAM), lambda p: torch.optim.AdamW(p, **ADAM)),
    "Adam": (lambda p: DeepSpeedCPUAdam(p, adamw_mode=False, **ADAM), lambda p: torch.optim.Adam(p, **ADAM)),
    "Adagrad": (
        lambda p: DeepSpeedCPUAdagrad(p, lr=0.05, weight_decay=0.3),
        lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.3),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_twenty_steps_are_those_of_torch(name: str) -> None:
    sides = []
    for make in TORCH[name]:
        params = [nn.Parameter(normal(shape, 50 + i)) for i, shape in enumerate(SHAPES)]
        optimizer = make(
            [{"params": params[:3]}, {"params": params[3:], "lr": 0.02, "weight_decay": 0.0, "eps": 1e-4}]
        )
        sources = [grads(shape, i, torch.float32) for i, shape in enumerate(SHAPES)]
        for _ in range(STEPS):
            for param, source in zip(params, sources, strict=True):
                param.grad = next(source)
            optimizer.step()
        sides.append(params)
    for ours, theirs in zip(*sides, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TORCH_DRIFT)


@settings(max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=5),
    dtype=st.sampled_from(list(UNITS)),
    layout=st.sampled_from(["plain", "reversed", "spread"]),
    limit=st.integers(1, 50),
    name=st.sampled_from([name for name in CASES if not name.startswith("FusedLamb")]),
)
def test_any_shapes_in_any_number_of_parts_are_each_element_alone(
    shapes: list[list[int]], dtype: torch.dtype, layout: str, limit: int, name: str
) -> None:
    """Beside one flat parameter of all elements: the same bits."""
    make = CASES[name][0]
    start = [normal(tuple(shape), 10 + i).to(dtype) for i, shape in enumerate(shapes)]
    whole = nn.Parameter(torch.cat([one.reshape(-1) for one in start]))
    parts = [nn.Parameter(strided(one.clone(), layout)) for one in start]
    alone, together = make([whole]), make(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "dslaunch.runtime.optimizers.fused_optimizer.step_flat",
            lambda formula, updates: step_flat(formula, updates, scratch_numel=limit),
        )
        for step in range(2):
            for i, part in enumerate(parts):
                part.grad = normal(tuple(shapes[i]), 100 * i + step).to(dtype)
            whole.grad = torch.cat([part.grad.reshape(-1) for part in parts if part.grad is not None])
            together.step()
            alone.step()
    assert torch.equal(whole, torch.cat([part.detach().reshape(-1) for part in parts]))

"""Each row of the registry, whatever the optimizer: its names, its fields,
and that all ways to do its step agree.

A new optimizer is tested here by its row, and by its segment in tests/kernels/optimizers.py.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.kernels import _C, SGD
from dslaunch.runtime.config.optimizer import optimizer_names, optimizer_params
from dslaunch.runtime.optimizers.flat_arrays import ElementRun, FlatArrays
from dslaunch.runtime.optimizers.formula import Formula
from dslaunch.runtime.optimizers.registry import FROM_CONFIG, OPTIMIZERS, OptimizerRow, row_of
from tests.kernels.optimizers import OPTIMIZERS as IN_TESTS, Optimizer, make_arrays
from tests.runtime.models import make_config, make_model, train_engine
from tests.runtime.ranks import Ranks

N, STEPS = 301, 4
ROUNDING = 4 * 12 * 4 * 2.0**-24  # as in test_formulas.py

every_row = pytest.mark.parametrize("row", OPTIMIZERS, ids=lambda row: row.module)
every_optimizer = pytest.mark.parametrize("optimizer", IN_TESTS, ids=str)
every_class = pytest.mark.parametrize(
    ("row", "name"), [(row, name) for row in OPTIMIZERS for name in row.classes], ids=str
)


def formula_of(optimizer: Optimizer) -> Formula:
    """The formula over this kernel in this mode."""
    formulas = [one for row in OPTIMIZERS for one in row.load("FORMULAS") if one.kernel is optimizer.kernel]
    return next((one for one in formulas if one.mode == optimizer.mode), formulas[0])


def group_of(optimizer: Optimizer) -> dict[str, Any]:
    """The test's hyper-parameters, by torch's names."""
    numbers = {field.name: getattr(optimizer.segment, field.name) for field in optimizer.kernel.numbers}
    group = {name: value for name, value in numbers.items() if name not in ("beta1", "beta2", "step")}
    if "beta1" in numbers:
        group["betas"] = (numbers["beta1"], numbers["beta2"])
    return group


class Watched:
    """Another object, and which of its fields were asked for."""

    def __init__(self, other: Any) -> None:
        self._other = other
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.asked.add(name)
        return getattr(self._other, name)


# ---- one table of fields -----------------------------------------------------------------------------------


@every_optimizer
def test_the_compiled_step_reads_the_fields_that_the_classes_have(optimizer: Optimizer) -> None:
    segment = Watched(optimizer.whole(8)[0])
    shard = Watched(make_arrays(optimizer, 8).under([segment]))
    optimizer.run([shard])
    names = {field.name for field in fields(optimizer.kernel.shard)}
    assert shard.asked == names - {"scales"}  # which states of 8 bits alone have
    names = {field.name for field in fields(optimizer.kernel.segment)}
    assert segment.asked == names - {"first"}  # which segments with a seed alone have


def test_an_optimizer_or_a_mode_that_the_compiled_module_does_not_have_is_refused() -> None:
    for name, mode, message in (
        ("Nothing", 0, "optimizer: 'Nothing'; not one of those in kernels/bindings/steps.cpp"),
        ("Lion", 1, "mode: 1; Lion has the modes 0 to 0"),
        ("Adam", -1, "mode: -1; Adam has the modes 0 to 1"),
        ("Lamb", 0, "optimizer: 'Lamb' steps in two passes, by calls of its own"),
    ):
        for call in (_C.step_reference, lambda *a, **k: _C.step(*a, **k, num_threads=0)):
            with pytest.raises(ValueError, match="^" + message):
                call(name, [], grad_scale=1.0, mode=mode)


# ---- names -----------------------------------------------------------------------------------------------


@every_row
def test_a_row_names_what_there_is(row: OptimizerRow) -> None:
    assert {one.name for one in row.load("FORMULAS")} == set(row.names)
    assert all(row.formula(name).name == name for name in row.names)
    assert row.is_elementwise is all(one.is_elementwise for one in row.load("FORMULAS"))
    for kind in [row.load(name) for name in row.classes] + [
        getattr(torch.optim, name) for name in row.torch_classes
    ]:
        assert row_of(kind) is row
        assert row_of(type("Derived", (kind,), {})) is None
    if row.config_class:
        assert row.names[0] in optimizer_names()
        assert "lr" in optimizer_params(row.names[0])


@every_class
def test_a_class_is_had_from_ops(row: OptimizerRow, name: str) -> None:
    home = getattr(dslaunch.ops, row.module) if row.is_deepspeeds else dslaunch.ops
    assert getattr(home, name) is row.load(name)


# ---- the step --------------------------------------------------------------------------------------------


def normal(seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


@every_optimizer
def test_torchs_operations_do_what_the_kernel_does(optimizer: Optimizer) -> None:
    formula, sides = formula_of(optimizer), []
    for way in ("update_in_host_memory", "update_with_torch"):
        group = {**group_of(optimizer), "lr": 0.1}
        arrays = FlatArrays(
            param=normal(0),
            grads=(),
            states={name: torch.zeros(N) for name in formula.names_for([group])},
            runs=(),
        )
        for step in range(1, STEPS + 1):
            arrays.grads = ((0, normal(step)),)
            arrays.runs = (ElementRun(offset=0, numel=N, group=group, step=step),)
            getattr(formula, way)([arrays])
        sides.append(arrays)
    kernels, torchs = sides
    torch.testing.assert_close(kernels.param, torchs.param, rtol=0, atol=ROUNDING)
    assert not torch.equal(kernels.param, normal(0))
    for name, state in kernels.states.items():
        torch.testing.assert_close(state, torchs.states[name], rtol=1e-6, atol=ROUNDING)


@every_class
def test_a_class_steps_as_its_formula_does_and_goes_on_from_what_it_saved(
    row: OptimizerRow, name: str
) -> None:
    kind = row.load(name)
    param = nn.Parameter(normal(0))
    optimizer = kind([param], lr=0.1)
    (group,) = optimizer.param_groups
    formula = optimizer.formula_of(group)
    flat, states = normal(0), {name: torch.zeros(N) for name in formula.names_for([group])}
    for step in range(1, STEPS + 1):
        param.grad = normal(step)
        optimizer.step()
        run = ElementRun(offset=0, numel=N, group=group, step=step)
        formula.update([FlatArrays(param=flat, grads=((0, normal(step)),), states=states, runs=(run,))])
        again = kind([param], lr=0.3)
        again.load_state_dict(optimizer.state_dict())
        optimizer, group = again, again.param_groups[0]
    assert group["lr"] == 0.1
    assert torch.equal(param.detach(), flat)
    for state, values in states.items():
        assert torch.equal(optimizer.state[param][state], values)


def _train(rank: int) -> dict[str, tuple[str, bool, list[str]]]:
    found = {}
    for name in FROM_CONFIG:
        config = make_config(stage=2, optimizer={"type": name, "params": {"lr": 0.01}})
        engine, optimizer, *_ = dslaunch.initialize(model=make_model(), config=config)
        assert optimizer is not None
        train_engine(engine, steps=2)
        rule = optimizer.rule
        found[name] = (
            rule.name,
            rule.steps_by_sub_buffer,
            sorted(
                {state for sub_buffer in optimizer.sub_buffers for state in sub_buffer.optimizer_shard.states}
            ),
        )
    return found


def test_a_ds_config_names_it_and_an_engine_steps_it(ranks: Ranks) -> None:
    (found,) = ranks(_train, world_size=1)
    for name, row in FROM_CONFIG.items():
        states = sorted(row.formula().state_names) if row.is_elementwise else []
        assert found[name] == (name, row.is_elementwise, states)


def test_a_state_that_is_not_there_is_refused_where_it_is_needed() -> None:
    formula = next(one for row in OPTIMIZERS for one in row.load("FORMULAS") if one.kernel is not SGD)
    run = ElementRun(
        offset=0,
        numel=N,
        group={("betas"): (0.9, 0.99), ("lr"): 0.1, ("eps"): 1e-8, ("weight_decay"): 0.0},
        step=1,
    )
    arrays = FlatArrays(param=normal(0), grads=((0, normal(1)),), states={}, runs=(run,))
    with pytest.raises(TypeError, match=r"shards\[0\].exp_avg: a NoneType gives no access"):
        formula.update([arrays])

"""zero.Init: what a model's construction does to parameters that are there: ties, replacements, deletions,
moves, parametrizations. The model comes out, and trains, as if it had been made plainly on rank 0.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, remove_weight_norm, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import dslaunch
from dslaunch import zero
from dslaunch.runtime.zero.parameters.early_parameter import early_of
from dslaunch.runtime.zero.parameters.freed_parameter import FreedParameter
from tests.exhaustive import few
from tests.runtime.models import (
    ADAMW,
    assert_same_bits,
    make_config,
    snapshot,
    train_engine,
    train_plain,
    worst_difference,
)
from tests.runtime.ranks import Ranks

# after two updates of up to 1e-2 of elements of about 1, whose gradients are added up in another order
TOLERANCE = 2e-5


class Model(nn.Module):
    """Four layers; `change` is the last thing that happens to them, followed by nothing."""

    def __init__(self, change: Callable[[Model], None]) -> None:
        super().__init__()
        self.first = nn.Linear(7, 15)
        self.one = nn.Linear(15, 15)
        self.two = nn.Linear(15, 15)
        self.last = nn.Linear(15, 1)
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in (self.one, self.two):
            x = x + (torch.tanh(layer(x)) if callable(layer) else x)
        more = vars(self).get("more", [])
        result: Tensor = self.last(x) + sum(value.sum() for value in more)
        return result


def _initialize(model: Model) -> None:
    for layer in (model.one, model.two):
        nn.init.normal_(layer.weight, std=0.2)
        nn.init.normal_(layer.bias, std=0.2)


def _tie(model: Model) -> None:
    _initialize(model)
    model.two.weight = model.one.weight
    model.two.bias = model.one.bias


def _tie_both_ways(model: Model) -> None:
    model.two.weight = model.one.weight
    _initialize(model)
    model.one.weight = model.two.weight
    model.one.bias = nn.Parameter(torch.rand(15))
    model.two.bias = model.one.bias


def _replace(model: Model) -> None:
    _initialize(model)
    model.one.weight = nn.Parameter(torch.rand(15, 15))
    model.one.bias = nn.Parameter(torch.rand(15))
    model.one.bias = nn.Parameter(torch.rand(15))


def _replace_by_its_values(model: Model) -> None:
    _initialize(model)
    model.one.weight = nn.Parameter(model.one.weight.data)
    model.one.bias = nn.Parameter(model.one.bias)
    model.two.weight = nn.Parameter(model.two.weight.detach().t())


def _take_out(model: Model) -> None:
    _initialize(model)
    model.one.bias = None
    model.two.register_parameter("bias", None)


def _make_buffers(model: Model) -> None:
    _initialize(model)
    values = model.one.weight
    del model.one.weight
    model.one.register_buffer("weight", values.detach().clone())
    bias = model.two.bias  # sharded by now, as its weight, or not
    del model.two.bias
    model.two.register_buffer("bias", bias)
    weight = model.two.weight
    del model.two.weight
    model.two.register_buffer("weight", weight.data)


def _move(model: Model) -> None:
    _initialize(model)
    weight, bias = model.one.weight, model.two.bias
    del model.one, model.two.bias
    model.extra = nn.Tanh()
    model.one = nn.Linear(15, 15)
    model.one.weight = weight
    model.two.register_parameter("bias", bias)


def _delete(model: Model) -> None:
    _initialize(model)
    model.one = None  # type: ignore[assignment]
    del model.two
    model.two = nn.Identity()  # type: ignore[assignment]


def _register_twice(model: Model) -> None:
    _initialize(model)
    model.one.again = model.one.weight
    model.one.again = model.one.weight
    model.one_again = model.one
    del model.one
    model.one = model.one_again


def _copy(model: Model) -> None:
    _initialize(model)
    model.one = copy.deepcopy(model.two)
    model.one.weight = nn.Parameter(model.one.weight.data * 2)
    nn.init.ones_(model.last.bias)
    model.two = copy.deepcopy(model.one)
    model.two.bias = model.one.bias


def _leave_garbage(model: Model) -> None:
    """Modules that only the search for garbage finds, which one rank does earlier."""
    for _ in range(3):
        lost = nn.Linear(15, 15)
        vars(lost)["own"] = lost  # a circle
        nn.init.normal_(lost.weight)
        model.two.weight = nn.Parameter(lost.weight.data)  # in the memory of what is lost
        lost.bias = nn.Parameter(torch.rand(15))
        model.two.bias = lost.bias
        del lost
        if _is_first():
            gc.collect()


def _fail_inside(model: Model) -> None:
    """A part whose construction fails is made in another way."""

    def fail() -> None:
        part = nn.Linear(15, 15)
        vars(part)["own"] = part
        nn.init.normal_(part.weight)
        model.one.weight = part.weight
        raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        fail()
    model.two = nn.Linear(15, 15)


def _keep_unregistered(model: Model) -> None:
    """What no module has any longer is a tensor of the program's."""
    _initialize(model)
    vars(model)["more"] = [model.one.weight, model.two.bias]
    model.more[0].data.fill_(0.5)
    model.more[1].data.fill_(0.25)
    model.one.weight = nn.Parameter(torch.rand(15, 15))
    model.two.bias = nn.Parameter(torch.rand(15))


def _prune(model: Model) -> None:
    _initialize(model)
    prune.l1_unstructured(model.one, "weight", amount=0.3)  # type: ignore[no-untyped-call]
    prune.l1_unstructured(model.two, "weight", amount=0.3)  # type: ignore[no-untyped-call]
    prune.remove(model.two, "weight")  # type: ignore[no-untyped-call]


def _weight_norm(module: nn.Module) -> nn.Module:
    """torch's older function, which warns that it is old."""
    with warnings.catch_warnings(action="ignore"):
        return weight_norm(module)


def _norm(norm: Callable[[nn.Module], nn.Module], *, is_written: bool) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        if is_written:
            _initialize(model)
        norm(model.one)
        norm(model.two)

    return change


def _norm_and_remove(model: Model) -> None:
    parametrizations.weight_norm(model.one)
    parametrizations.spectral_norm(model.two)
    remove_parametrizations(model.one, "weight")
    remove_parametrizations(model.two, "weight", leave_parametrized=False)
    _weight_norm(model.two)
    remove_weight_norm(model.two)


class _Scaled(nn.Module):
    """A parametrization with parameters, whose right inverse puts other values into the original."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(15))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift

    def right_inverse(self, x: Tensor) -> Tensor:
        return torch.ones(15, 15) - self.shift


def _set(model: Model) -> None:
    register_parametrization(model.one, "weight", _Scaled())
    register_parametrization(model.two, "weight", _Scaled())


CHANGES: dict[str, Callable[[Model], None]] = {
    "tie": _tie,
    "tie both ways": _tie_both_ways,
    "replace": _replace,
    "replace by its values": _replace_by_its_values,
    "none": _take_out,
    "buffers": _make_buffers,
    "move": _move,
    "delete": _delete,
    "register twice": _register_twice,
    "copy": _copy,
    "garbage": _leave_garbage,
    "fail inside": _fail_inside,
    "unregistered": _keep_unregistered,
    "prune": _prune,
    "weight_norm": _norm(parametrizations.weight_norm, is_written=False),
    "weight_norm, written": _norm(parametrizations.weight_norm, is_written=True),
    "spectral_norm": _norm(parametrizations.spectral_norm, is_written=False),
    "spectral_norm, written": _norm(parametrizations.spectral_norm, is_written=True),
    "orthogonal": _norm(parametrizations.orthogonal, is_written=True),
    "hooks of weight_norm": _norm(_weight_norm, is_written=False),
    "hooks of weight_norm, written": _norm(_weight_norm, is_written=True),
    "hooks of spectral_norm": _norm(spectral_norm, is_written=False),
    "hooks of spectral_norm, written": _norm(spectral_norm, is_written=True),
    "norms removed": _norm_and_remove,
    "set": _set,
}


def _is_first() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _make(name: str, *, seed: int = 0, is_early: bool = True) -> Model:
    torch.manual_seed(seed)
    with zero.Init(enabled=is_early):
        return Model(CHANGES[name])


FEW = ["tie", "replace by its values", "buffers", "move", "garbage", "unregistered", "spectral_norm", "set"]


def _build_and_train(rank: int, names: Sequence[str]) -> dict[str, Any]:
    """Of each change: what is not sharded, the values, and those after two steps."""
    gc.disable()  # on rank 0 it is searched for all the same
    found = {}
    for name in names:
        try:
            model = _make(name, seed=rank)
            whole = [key for key, param in model.named_parameters() if type(param) is not FreedParameter]
            values = snapshot(model.named_parameters())
            model = _make(name)
            engine = dslaunch.initialize(model=model, config=make_config(stage=3))[0]
            assert not any(early_of(param) for param in model.parameters())
            train_engine(engine, steps=2)
            found[name] = (whole, values, snapshot(model.named_parameters()))
            engine.destroy()
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    gc.enable()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", few([FEW, [name for name in CHANGES if name not in FEW]], lambda names: names is FEW)
)
def test_parameters_may_be_tied_replaced_moved_and_deleted(ranks: Ranks, names: list[str]) -> None:
    results = ranks(_build_and_train, names, world_size=2)
    for name in names:
        plain = _make(name, is_early=False)
        expected = snapshot(plain.named_parameters())
        train_plain(plain, torch.optim.AdamW(plain.parameters(), **ADAMW["params"]), steps=2)
        for found in results:
            whole, values, trained = found[name]
            assert whole == [], name
            assert_same_bits(values, expected)
            assert worst_difference(trained, snapshot(plain.named_parameters())) < TOLERANCE, name


def _raise_outside(rank: int) -> dict[str, Tensor]:
    """A model whose construction fails after such changes, and the next one."""

    def fail(model: Model) -> None:
        _tie(model)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), zero.Init():
        Model(fail)
    return snapshot(_make("tie").named_parameters())


def test_a_construction_that_fails_after_ties_leaves_nothing_behind(ranks: Ranks) -> None:
    expected = {name: param.detach() for name, param in _make("tie", is_early=False).named_parameters()}
    for values in ranks(_raise_outside, world_size=2):
        assert_same_bits(values, expected)


def _alone(rank: int) -> dict[str, dict[str, Tensor]]:
    return {name: snapshot(_make(name).named_parameters()) for name in CHANGES}


def test_a_rank_that_is_alone_has_the_same(ranks: Ranks) -> None:
    (found,) = ranks(_alone, world_size=1)
    for name, values in found.items():
        plain = _make(name, is_early=False)
        assert_same_bits(values, {key: param.detach() for key, param in plain.named_parameters()})

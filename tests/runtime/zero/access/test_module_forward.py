"""Stage 3: what was set on modules is there while an engine has the model, in copies, and afterwards."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dslaunch
from tests.runtime.models import batch, make_model
from tests.runtime.ranks import Ranks
from tests.runtime.training.hard_models import WIDTH, Model
from tests.runtime.training.test_hard_cases import make_config

Patch = Callable[[nn.Module], None]


def _nothing(block: nn.Module) -> None:
    """The class's."""


def _by_default(block: nn.Module) -> None:
    block.forward = lambda x, block=block: 2 * block.down(torch.tanh(block.up(x)))  # type: ignore[assignment]


def _by_closure(block: nn.Module) -> None:
    before = block.forward
    block.forward = lambda x: 3 * before(x)


def _by_weight(block: nn.Module) -> None:
    weight = block.get_parameter("up.weight")
    block.forward = lambda x: F.linear(x, weight) @ weight


def _by_method(block: nn.Module) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x)) - x
        return result

    block.forward = MethodType(forward, block)


def _scaled(module: nn.Module, scale: float, x: Tensor) -> Tensor:
    result: Tensor = scale * module.down(module.up(x))
    return result


def _by_partial(block: nn.Module) -> None:
    block.forward = functools.partial(_scaled, block, 0.5)


def _recursive(block: nn.Module) -> None:
    """A function that is in its own closure, behind a list."""
    steps = [block.down, block.up]

    def forward(x: Tensor, left: int = 2) -> Tensor:
        return forward(steps[0](steps[1](x)), left - 1) if left else x

    block.forward = forward


def _as_accelerate(block: nn.Module) -> None:
    """accelerate.hooks.add_hook_to_module"""

    def forward(module: nn.Module, *args: Tensor) -> Tensor:
        result: Tensor = module._old_forward(*args) * 0.25  # type: ignore[operator]
        return result

    before = block.forward
    block._old_forward = before  # type: ignore[assignment]
    block.forward = functools.update_wrapper(functools.partial(forward, block), before)


PATCHES = {
    patch.__name__.lstrip("_"): patch
    for patch in (
        _nothing,
        _by_default,
        _by_closure,
        _by_weight,
        _by_method,
        _by_partial,
        _recursive,
        _as_accelerate,
    )
}


def _patched(patch: Patch) -> Model:
    model = make_model(Model)
    assert isinstance(model, Model)
    patch(model.blocks[1])
    return model


def _zeroed(model: nn.Module) -> Tensor:
    """The model's output once all of its own parameters are 0."""
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        result: Tensor = model(batch(0, width=WIDTH))
    return result


def _seen(rank: int, name: str, is_late: bool) -> None:
    patch, x = PATCHES[name], batch(0, width=WIDTH)
    plain = _patched(patch)
    expected = plain(x)
    model = make_model(Model) if is_late else _patched(patch)
    own = {block: block.__dict__.get("forward") for block in model.modules()}
    engine, *_ = dslaunch.initialize(model=model, config=make_config(3))
    if is_late:
        patch(model.get_submodule("blocks.1"))
    with torch.no_grad():
        assert torch.equal(engine(x), expected)
        with dslaunch.zero.GatheredParameters(model.parameters()):
            twin = copy.deepcopy(model)
        if not is_late:
            assert torch.equal(twin(x), expected)
            assert torch.equal(copy.deepcopy(twin)(x), expected)
            assert torch.equal(_zeroed(twin), _zeroed(plain))
        engine.destroy()
        assert torch.equal(model(x), expected)
        engine, *_ = dslaunch.initialize(model=model, config=make_config(3))
        assert torch.equal(engine(x), expected)
        engine.destroy()
        assert torch.equal(model(x), expected)
    late = model.get_submodule("blocks.1") if is_late else None
    for block, forward in own.items():
        if block is not late:
            assert block.__dict__.get("forward") is forward


def _all_seen(rank: int, is_late: bool) -> bool:
    for name in PATCHES:
        _seen(rank, name, is_late)
    return True


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_a_forward_that_was_set_on_an_instance_is_kept(ranks: Ranks, is_late: bool) -> None:
    """Before initialize(), and after it."""
    assert ranks(_all_seen, is_late, world_size=2) == [True, True]


def _of_copies(rank: int) -> bool:
    """Copies are plain modules: they can be pickled, have one signature, and share what they write."""
    calls = [0]
    model = make_model(Model)
    block, other = model.get_submodule("blocks.0"), model.get_submodule("blocks.2")

    def forward(x: Tensor, *, left_out: bool = False) -> Tensor:
        nonlocal calls
        calls = [calls[0] + 1]
        return x if left_out else block.down(block.up(x))

    block.forward = forward
    engine, *_ = dslaunch.initialize(model=model, config=make_config(3))
    x = batch(0, width=WIDTH)
    with torch.no_grad(), dslaunch.zero.GatheredParameters(model.parameters()):
        twin = copy.deepcopy(model)
        part = copy.deepcopy(other.forward)  # as of a bound method: with a module of its own
        assert torch.equal(part(x), other(x))
        assert part.__self__ is not other
    assert inspect.signature(twin.get_submodule("blocks.0").forward) == inspect.signature(forward)
    with torch.no_grad():
        assert torch.equal(twin(x), engine(x))
    assert calls == [2]
    found = pickle.loads(pickle.dumps(twin.get_submodule("blocks.2")))
    assert torch.equal(found(x), twin.get_submodule("blocks.2")(x))
    engine.destroy()
    pickle.dumps(model.get_submodule("blocks.2"))
    return True


def test_a_copy_is_like_any_other_module(ranks: Ranks) -> None:
    assert ranks(_of_copies, world_size=2) == [True, True]

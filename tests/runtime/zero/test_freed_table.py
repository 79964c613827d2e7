"""Everything that can be asked of a freed parameter: what is true, the values, or a refusal by name.

All attributes of torch.Tensor, and the functions of torch that take tensors, are asked as of a plain
parameter of the same values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError, zero
from dslaunch.runtime.zero.parameters.freed_parameter import FreedParameter, FreedValues
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks

PAGE = Path(__file__).parents[3] / "docs" / "train" / "zero.md"
LAPACK = 1e-5  # it rounds by where in memory a matrix lies
X, S, V, R, B = "itself", "a square", "a vector", "a row", "a mask"
OTHERS = {
    S: torch.full((3, 3), 0.5),
    V: torch.ones(3),
    R: torch.ones(1, 3),
    B: torch.ones(3, 3, dtype=torch.bool),
}
INDEX = torch.tensor([0])
# The first with which a plain tensor can do something are taken.
ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (), (S,), (1,), (0, 1), (S, S), (0.5,), ((3, 3),), (torch.float32,), (0, INDEX, R), (0, INDEX, S),
    (INDEX,), (0, INDEX), (0, INDEX, 1.0), (B,), (B, 1.0), (-1, 1), (B, S), (0, 0, 1), (0, 1, 1), (V,),
    (V, V), (S, 0), (3, 3), (0, 1, 2), (2.0, 2.0), ((0,), (1,)), (S, S, S), ([1, 2],), (2,), (3,), (None,),
    (slice(0, 1),), (slice(0, 1), 2.0), (lambda grad: grad,),
)  # fmt: skip
OF_FUNCTIONS: tuple[tuple[Any, ...], ...] = (
    (X,), (X, S), ([X, S],), (S, X), (X, 1), (X, (3, 3)), (X, S, S), (X, torch.float32), (X, 0, 1), (X, 0.5),
    ([X],),
)  # fmt: skip
# Of the object, or of Python.
OWN = {
    *("__class__", "__dict__", "__dir__", "__doc__", "__module__", "__annotations__", "__weakref__"),
    *("__getattribute__", "__setattr__", "__init__", "__new__", "__init_subclass__", "__subclasshook__"),
    *(
        "__getstate__",
        "__setstate__",
        "__sizeof__",
        "__hash__",
        "__repr__",
        "__str__",
        "_cdata",
        "_use_count",
        "_reduce_ex_internal",
    ),
    *("register_hook", "register_post_accumulate_grad_hook", "data_ptr", "const_data_ptr", "storage"),
    *("untyped_storage", "_typed_storage", "_fix_weakref", "_view_func", "_view_func_unsafe", "_base"),
    *("_rev_view_func_unsafe", "_make_subclass", "_make_wrapper_subclass", "_python_dispatch", "_is_view"),
}
# No operation: random memory, settings, and what torch does without asking the class of a tensor.
LEFT_OUT = {
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "new",
    "seed",
    "manual_seed",
    "compile",
    "save",
    "load",
}
UNASKED = {
    "tensor",
    "as_tensor",
    "asarray",
    "to_dlpack",
    "sparse_coo_tensor",
    "vmap",
    "from_dlpack",
    "classproperty",
}
SKIPPED = (
    "set_",
    "prepare_",
    "sym_",
    "is_vulkan",
    "is_autocast",
    "autocast",
    "cudnn",
    "miopen",
    "mkldnn",
    "fbgemm",
    "use_",
    "get_",
    "init",
    "_",
)


class Question(NamedTuple):
    """Something to ask of a tensor, and what a plain one answers."""

    name: str
    ask: Callable[[Tensor], Any]
    answer: Any


def _plain(values: Tensor, *, is_detached: bool) -> Tensor:
    weight = nn.Parameter(torch.empty_like(values))
    with torch.no_grad():
        weight.copy_(values)
    return weight.detach() if is_detached else weight


def _filled(given: Any, x: Tensor) -> Any:
    if isinstance(given, list):
        return [_filled(one, x) for one in given]
    if given is X:
        return x
    return OTHERS[given].clone() if isinstance(given, str) else copy.copy(given)


def _attribute(name: str, given: tuple[Any, ...]) -> Callable[[Tensor], Any]:
    def ask(x: Tensor) -> Any:
        found = getattr(x, name)
        return found(*(_filled(one, x) for one in given)) if callable(found) else found

    return ask


def _function(function: Callable[..., Any], given: tuple[Any, ...]) -> Callable[[Tensor], Any]:
    return lambda x: function(*(_filled(one, x) for one in given))


def _asked(ask: Callable[[Tensor], Any], x: Tensor) -> Any:
    torch.default_generator.manual_seed(
        1
    )  # torch.manual_seed() notes who calls it: most of the time of a question
    with torch.no_grad():
        return ask(x)


def _questions(*, is_detached: bool) -> Iterator[Question]:
    """All that a plain tensor answers."""
    of_tensor = [
        (name, [_attribute(name, given) for given in ARGUMENTS])
        for name in sorted(set(dir(Tensor)) - OWN - LEFT_OUT)
        if name not in ("cuda", "xpu", "mtia", "hpu", "ipu")
    ]
    of_torch = [
        (f"{module.__name__}.{name}", [_function(getattr(module, name), given) for given in OF_FUNCTIONS])
        for module in (torch, nn.functional, torch.linalg, torch.fft, torch.special)
        for name in sorted(set(dir(module)) - LEFT_OUT - UNASKED)
        if callable(getattr(module, name)) and not isinstance(getattr(module, name), type)
        if not name.startswith(SKIPPED) and not name.startswith("has_")
    ]
    torch.manual_seed(0)
    values = nn.Linear(3, 3, bias=False).weight.detach()
    for name, ways in (*of_tensor, *of_torch):
        for ask in ways:
            try:
                answer = _asked(ask, _plain(values, is_detached=is_detached))
            except Exception:
                continue
            if answer is not NotImplemented:
                yield Question(name, ask, answer)
                break


def _is_same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        same_kind = isinstance(found, Tensor) and (found.shape, found.dtype) == (
            expected.shape,
            expected.dtype,
        )
        if not same_kind or type(found) in (FreedParameter, FreedValues) or expected.layout != torch.strided:
            return same_kind
        pair = (found.detach().to(torch.complex128), expected.detach().to(torch.complex128))
        return bool(torch.allclose(*pair, rtol=LAPACK, atol=LAPACK, equal_nan=True))
    if isinstance(expected, np.ndarray):
        return isinstance(found, np.ndarray) and bool((found == expected).all())
    if isinstance(expected, (tuple, list)):
        return len(found) == len(expected) and all(map(_is_same, found, expected))
    plain = isinstance(expected, (bool, int, float, str, torch.dtype, torch.device, torch.Size, type(None)))
    return type(found) is type(expected) and (not plain or found == expected)


def _freed(is_early: bool, keep: list[Any]) -> nn.Parameter:
    torch.manual_seed(0)
    with zero.Init():
        model = nn.Linear(3, 3, bias=False)
    keep.append(model)
    if not is_early:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": make_config(stage=3)["zero_optimization"],
        }
        keep.append(dslaunch.initialize(model=model, config=config)[0])
    return model.weight


def _table(rank: int, is_early: bool, is_detached: bool) -> tuple[list[str], list[str], list[str]]:
    """What is answered, what is refused by name, and what is neither, or wrong."""
    keep: list[Any] = []
    answered, refused, wrong = [], [], []
    x: Tensor = _freed(is_early, keep)
    whole = x
    for question in _questions(is_detached=is_detached):
        if is_early:
            whole = _freed(is_early, keep)
        x = whole.detach() if is_detached else whole
        try:
            found = _asked(question.ask, x)
        except ConfigError as error:
            is_named = "weight' was asked for" in str(error) and "GatheredParameters" in str(error)
            (refused if is_named else wrong).append(question.name)
            continue
        except Exception as error:
            wrong.append(f"{question.name}: {type(error).__name__} {error}")
            continue
        answered.append(question.name)
        if not _is_same(found, question.answer):
            wrong.append(f"{question.name}: {found!r:.80}, not {question.answer!r:.80}")
        if not is_early and type(whole) is not FreedParameter:
            wrong.append(f"{question.name}: it has changed the parameter")
            break
    return answered, refused, wrong


def _tables(rank: int) -> list[tuple[list[str], list[str], list[str]]]:
    return [_table(rank, False, is_detached) for is_detached in (False, True)]


@pytest.mark.exhaustive  # a model for each question
@pytest.mark.parametrize("is_detached", [False, True])
def test_before_initialize_all_is_answered_as_by_a_plain_parameter(ranks: Ranks, is_detached: bool) -> None:
    for answered, refused, wrong in ranks(_table, True, is_detached, world_size=2):
        assert wrong == []
        assert refused == ["__reduce_ex__"]
        assert len(answered) > 1000


@pytest.mark.slow
def test_after_initialize_what_is_not_described_is_refused_by_name(ranks: Ranks) -> None:
    page = PAGE.read_text()
    for tables in ranks(_tables, world_size=2):
        for answered, refused, wrong in tables:
            assert wrong == []
            assert len(refused) > 900
            names = {name.rpartition(".")[2] for name in answered if not name.startswith("_")}
            assert [name for name in sorted(names) if f"`{name}`" not in page] == []

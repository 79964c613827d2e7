"""A plugin of pytest for DeepSpeed's harness, which is made for pytest 8.3.

It makes a fixture of each class that derives from the harness's DistributedFixture: the harness marks the
class with an attribute that pytest reads up to 8.3, and from 9.1 on a plugin can register a fixture itself.

And it lets a rank fail by pytest.fail(), as `pytest.raises` does when nothing is raised. The harness runs
ranks in a pool of processes, and a process of a pool ends without an answer there: for the harness the test
hangs, and it ends the whole run.

The ranks of a test are forked from a server that has imported torch and deepspeed, so that a test takes a
second and not ten.

And four parts of the tests are others. Two take a rank's number for the name of its GPU, and work on a
machine without GPUs here: what all ranks say together, and torch's DistributedDataParallel, with which the
tests compare. One asks for the version of NCCL where bfloat16 is tested. The last compares two engines
after a checkpoint by buffers inside of DeepSpeed's optimizers; here it compares all parameters, master
weights and states by DeepSpeed's public functions.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import deepspeed
import deepspeed.utils
import pytest
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dslaunch.runtime.compat.engine.engines import Engine

FOR_EACH_RANK = (
    "torch",
    "torch.testing",
    "torch._dynamo",
    "pytest",
    "dslaunch.runtime.compat.engine.initialize",
    "deepspeed",
    "unit.common",
    __name__,
)

_pool = torch.multiprocessing.Pool
_distributed = DistributedDataParallel.__init__


def _answer(function: Callable[..., object], arguments: tuple[object, ...]) -> object:
    if common := sys.modules.get("unit.common"):
        vars(common)["reduce_boolean_flags"] = _flags_of_all_ranks
    if common := sys.modules.get("unit.checkpoint.common"):
        vars(common).update(compare_model_states=_compare_models, compare_optimizer_states=_compare_states)
        # What their common.py reads of an engine, or watches, beside public names.
        Engine.sparse_tensor_module_names = frozenset()  # type: ignore[attr-defined]
        Engine._get_optimizer_ckpt_name = None  # type: ignore[attr-defined]
    gc.freeze()  # some tests collect garbage in each step, all modules included
    try:
        return function(*arguments)
    except pytest.fail.Exception as failure:
        raise AssertionError(failure.msg) from None


def _pool_that_answers(*args: Any, **kwargs: Any) -> Any:
    pool: Any = _pool(*args, **kwargs)
    starmap_async = pool.starmap_async

    def start(function: Callable[..., object], rows: Iterable[tuple[object, ...]]) -> Any:
        return starmap_async(_answer, [(function, row) for row in rows])

    pool.starmap_async = start
    return pool


def _flags_of_all_ranks(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
    flags = [flag]
    if torch.distributed.is_initialized():
        flags *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(flags, flag)
    return op(flags)


def _pairs(saved: Engine, loaded: Engine) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    others = dict(loaded.module.named_parameters())
    for name, param in saved.module.named_parameters():
        assert others[name] is not param, name
        yield name, param, others.pop(name)
    assert not others


def _assert_same(one: torch.Tensor | None, other: torch.Tensor | None, name: str) -> None:
    assert (one is None) == (other is None), name
    if one is not None and other is not None:
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7, msg=lambda text: f"{name}: {text}")


def _compare_models(
    saved: Engine, loaded: Engine, compare_optimizer: bool = True, load_module_only: bool = False
) -> None:
    if not load_module_only:
        vars(sys.modules["unit.checkpoint.common"])["compare_deepspeed_states"](saved, loaded)
    for name, one, other in _pairs(saved, loaded):
        with deepspeed.zero.GatheredParameters([one, other]):
            _assert_same(one.detach(), other.detach(), name)
        if compare_optimizer and one.requires_grad:
            get = deepspeed.utils.safe_get_full_fp32_param
            _assert_same(get(one), get(other), f"{name}, master")


def _compare_states(saved: Engine, loaded: Engine, hidden_dim: int, fp16: bool = True) -> None:
    get = deepspeed.utils.safe_get_full_optimizer_state
    for name, one, other in _pairs(saved, loaded):
        for key in ("exp_avg", "exp_avg_sq") if one.requires_grad else ():
            _assert_same(get(one, key), get(other, key), f"{name}, {key}")


def _wrap(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    if all(param.device.type == "cpu" for param in module.parameters()):
        kwargs |= {"device_ids": None, "output_device": None}
    _distributed(self, module, *args, **kwargs)


DistributedDataParallel.__init__ = _wrap  # type: ignore[method-assign]  # in the process of each rank


with contextlib.suppress(ImportError):  # before a test takes the function from it
    vars(importlib.import_module("unit.util"))["bf16_required_version_check"] = (
        lambda accelerator_check=True: True
    )


def pytest_configure() -> None:
    multiprocessing.set_forkserver_preload(list(FOR_EACH_RANK))
    torch.multiprocessing.Pool = _pool_that_answers


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Register `obj`, a class that the module defines, under its name;
    their conftest.py then runs it before the test.
    """
    if not hasattr(pytest, "register_fixture"):
        return
    if inspect.isclass(obj) and getattr(obj, "is_dist_fixture", False) and not inspect.isabstract(obj):
        pytest.register_fixture(name=name, func=obj, node=collector)

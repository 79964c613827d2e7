"""A plugin of pytest for DeepSpeed's harness, which is made for pytest 8.3.

It makes a fixture of each class that derives from the harness's DistributedFixture: the harness marks the
class with an attribute that pytest reads up to 8.3, and from 9.1 on a plugin can register a fixture itself.

And it lets a rank fail by pytest.fail(), as `pytest.raises` does when nothing is raised. The harness runs
ranks in a pool of processes, and a process of a pool ends without an answer there: for the harness the test
hangs, and it ends the whole run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch.multiprocessing

_pool = torch.multiprocessing.Pool


def _answer(function: Callable[..., object], arguments: tuple[object, ...]) -> object:
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


def pytest_configure() -> None:
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

"""Functions that torch.compile leaves alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch.runtime.zero.parameters.uncompiled import uncompiled

TIMEOUT_S = 120
MANY = 12  # more than torch compiles one function for
# What a stage of divided layers does that would load the compiler, or what it calculates shapes with.
ALONE = """
import sys, torch
from dslaunch.runtime.pipeline.executor import _Live
from dslaunch.runtime.zero.parameters.uncompiled import uncompiled

assert uncompiled(lambda x: x + 1)(1) == 2
x = torch.ones(3, requires_grad=True)
_Live((x,), (torch.sin(x),), (torch.full((3,), 2.0),)).run_backward()
assert torch.allclose(x.grad, 2 * torch.cos(torch.ones(3)))
heavy = {"torch._dynamo", "sympy"} & sys.modules.keys()
assert not heavy, heavy
"""


@pytest.mark.slow
def test_a_process_that_compiles_nothing_does_not_load_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_compiler_ends_its_graph_there_and_compiles_no_call() -> None:
    graphs: list[Any] = []
    compiling: list[bool] = []

    def backend(graph: Any, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    def make(number: int) -> Callable[[Tensor], Tensor]:
        @uncompiled
        def add(x: Tensor) -> Tensor:
            compiling.append(torch.compiler.is_compiling())
            return x + number

        return add

    first, second, *others = [make(number) for number in range(MANY)]

    def straight(x: Tensor) -> Tensor:
        return torch.cos(second(torch.cos(first(torch.cos(x)))))

    def turns(x: Tensor) -> Tensor:  # a break inside a loop: none of this is compiled, but what it calls
        for one in others:
            x = one(x)
        return x

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = torch.ones(2)
    found = torch.compile(straight, backend=backend)(x)
    torch.testing.assert_close(found, torch.cos(torch.cos(torch.cos(x)) + 1))
    assert len(graphs) == 3
    graphs.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for size in (2, 3, 4):
            torch.compile(turns, backend=backend)(torch.ones(size))
    assert not graphs
    assert not any(compiling)
    # those of `straight`, `turns`, and what torch has compiled besides; none for each of the calls
    assert torch._dynamo.utils.counters["frames"]["total"] < MANY
    torch._dynamo.reset()

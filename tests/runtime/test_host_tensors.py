"""No tensor of the runtime lies where the program's default device happens to be: each says where."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2] / "runtime"
MAKERS = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def without_device(source: str) -> list[int]:
    """Return the lines of calls of torch that make a tensor and do not say where."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


def test_every_tensor_says_where_it_lies() -> None:
    """After torch.set_default_device("cuda") what was meant for host memory would be on the GPU."""
    found = {
        str(path): lines for path in RUNTIME.rglob("*.py") if (lines := without_device(path.read_text()))
    }
    assert not found, "give device=, and 'cpu' for host memory"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("torch.empty(3)", [1]),
        ("torch.empty(3, device='cpu')", []),
        ("x = [torch.tensor(\n1.0)]", [1]),
        ("torch.empty_like(x)", []),
        ("torch.full((), 1.0, pin_memory=True)", [1]),
    ],
)
def test_what_counts_as_silent(source: str, lines: list[int]) -> None:
    assert without_device(source) == lines

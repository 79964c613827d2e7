"""Tensors of every kind that torch has, as what autograd saves of a model at stage 3.

Each case makes one of a weight [8, 8], in its memory where that can be; the gradient is made of its values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

WIDTH = 8
PLACES = torch.eye(WIDTH).roll(1, 0) + torch.eye(WIDTH)  # of a sparse weight's elements


class Refusing(Tensor):
    """A class that answers nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} is not for this class")


class Opaque(Tensor):
    """A wrapper that does not say what is inside."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)  # type: ignore[attr-defined]
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Opaque(args[0].inside)
        raise TypeError(f"{func} is not for this class")


class Pair(Tensor):
    """A wrapper that says what is inside: two tensors of its shape."""

    a: Tensor
    b: Tensor

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)  # type: ignore[attr-defined]
        made.a, made.b = a, b
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: None, size: Any, stride: Any) -> Pair:
        return Pair(parts["a"], parts["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        a, b = (
            func(*(getattr(one, name) if isinstance(one, Pair) else one for one in args), **(kwargs or {}))
            for name in ("a", "b")
        )
        return Pair(a, b)


def _nested(values: Tensor) -> Tensor:
    """Two matrices in the memory of one."""
    sizes = torch.tensor([[3, WIDTH], [5, WIDTH]])
    first = int(values.storage_offset())
    strides, offsets = torch.tensor([[WIDTH, 1]] * 2), torch.tensor([first, first + 3 * WIDTH])
    made: Tensor = torch._nested_view_from_buffer(values.view(-1), sizes, strides, offsets)
    return made


def _dense_of_refusing(saved: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return saved.as_subclass(Tensor)  # type: ignore[arg-type]


def _emptied(values: Tensor) -> Tensor:
    memory = values.clone()
    memory.untyped_storage().resize_(0)
    return memory


def _same(saved: Any) -> Tensor:
    result: Tensor = saved
    return result


def _dense(saved: Any) -> Tensor:
    result: Tensor = saved.to_dense()
    return result


def _nothing(saved: Any) -> Tensor:
    """There are no values to be read."""
    assert tuple(saved.shape) == (WIDTH, WIDTH)
    return torch.ones(1)


def _coo(values: Tensor) -> Tensor:
    places = torch.ones(WIDTH, WIDTH).nonzero().t()
    return torch.sparse_coo_tensor(places, values.view(-1), (WIDTH, WIDTH), check_invariants=False)


def _csr(values: Tensor) -> Tensor:
    rows, columns = torch.arange(WIDTH + 1) * WIDTH, torch.arange(WIDTH).repeat(WIDTH)
    return torch.sparse_csr_tensor(rows, columns, values.view(-1), (WIDTH, WIDTH))


# By name: what is saved of the weight's values, and its elements again.
SAVED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "coo": (_coo, _dense),
    "csr": (_csr, _dense),
    "csc": (lambda values: values.to_sparse_csc(), _dense),
    "bsr": (lambda values: values.to_sparse_bsr((2, 2)), _dense),
    "bsc": (lambda values: values.to_sparse_bsc((2, 2)), _dense),
    "mkldnn": (lambda values: values.to_mkldnn(), _dense),
    "quantized": (
        lambda values: torch.quantize_per_tensor(values, 0.01, 0, torch.qint8),
        lambda saved: saved.dequantize(),
    ),
    "nested": (_nested, lambda saved: torch.cat(saved.unbind())),
    "jagged": (
        lambda values: torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, WIDTH])),
        lambda saved: saved.values(),
    ),
    "refusing": (lambda values: values.as_subclass(Refusing), _dense_of_refusing),
    "opaque": (Opaque, lambda saved: saved.inside),
    "wrapper": (lambda values: Pair(values, values), lambda saved: saved.a + saved.b),
    "wrapper of nothing of ours": (
        lambda values: Pair(values.clone(), values * 2),
        lambda saved: saved.a - saved.b,
    ),
    "masked": (lambda values: torch.masked.masked_tensor(values, values > 0), lambda saved: saved.get_data()),
    "meta": (lambda values: values.to("meta"), _nothing),
    "fake": (lambda values: FakeTensorMode().from_tensor(values.clone()), _nothing),
    "emptied": (_emptied, _nothing),
    "zero": (lambda values: torch._efficientzerotensor((WIDTH, WIDTH)), _nothing),
    "expanded": (lambda values: values[:1].expand(WIDTH, WIDTH), _same),
    "of no elements": (lambda values: values[WIDTH:], lambda saved: saved.new_ones(1) + saved.numel()),
    "negated": (torch._neg_view, _same),
    "conjugated": (
        lambda values: torch.complex(values, values).conj(),
        lambda saved: saved.imag + saved.real * 2,
    ),
    "as integers": (lambda values: values.view(torch.int32), lambda saved: saved.view(torch.float32)),
}


class Kept(torch.autograd.Function):
    """Multiplies by a number; the gradient, by a saved tensor's elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: list[Any], kind: str) -> Tensor:
        ctx.save_for_backward(x, *saved)
        ctx.kind = kind
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _, saved = ctx.saved_tensors
        _, read = SAVED[ctx.kind]
        return grads[0] * read(saved).sum(), None, None


class Layer(nn.Module):
    """Saves a tensor of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        make, _ = SAVED[self.kind]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # most kinds are said to be in beta
            saved = make(self.last.weight.detach())
        result: Tensor = self.last(Kept.apply(torch.tanh(self.first(x)), [saved], self.kind))
        return result


class SparseWeight(nn.Module):
    """A weight's elements at some places are the parameter, as in adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", PLACES.nonzero().t().contiguous(), persistent=False)
        self.values = nn.Parameter(torch.randn(self.places.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.sparse_coo_tensor(self.places, self.values, (WIDTH, WIDTH), check_invariants=False)
        return torch.sparse.mm(weight, x.t()).t()


class SparseInput(nn.Module):
    """A graph's neighbours, as a sparse matrix of a layout."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.linear = layout, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = torch.eye(len(x)).roll(1, 0).to_sparse(layout=getattr(torch, self.layout))
        return torch.sparse.mm(graph, self.linear(x))


class SparseTable(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] > 0).long() + 1)


class Mapped(nn.Module):
    """Runs its layer over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.tanh(self.linear(row)) * self.linear.weight.sum())(x)


class Slope(nn.Module):
    """Adds its layer's derivative along the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        value, slope = torch.func.jvp(lambda y: torch.tanh(self.linear(y)), (x,), (x,))
        return value + slope


def make_layers() -> dict[str, nn.Module]:
    """One layer for each kind."""
    return {
        **{kind: Layer(kind) for kind in SAVED},
        "weight": SparseWeight(),
        "graph in coo": SparseInput("sparse_coo"),
        "graph in csr": SparseInput("sparse_csr"),
        "table": SparseTable(),
        "vmap": Mapped(),
        "jvp": Slope(),
    }

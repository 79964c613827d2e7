"""Tensors that lie in files, and tensors made of them by operations that only move elements.

`FileTensor` is what transformers' conversions of weights are given in place of tensors: they cut, stack, join
and transpose it as usual, and each operation is noted, not done. Who wants a box of the result asks for it:
the box is followed back through the operations to boxes of tensors in files, and only these are read. An
operation that computes has no such boxes; its arguments are read whole, one result at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..files.boxes import boxes_of

Sizes = tuple[int, ...]
_aten = torch.ops.aten


class Values(ABC):
    """The elements of one tensor, wherever they come from."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    @abstractmethod
    def fill(self, out: Tensor, offsets: Sizes) -> None:
        """Write the box at `offsets` that is as large as `out` into it, rounded if its dtype is another.

        Errors: CheckpointError, of values in files
        """

    @property
    @abstractmethod
    def parts(self) -> tuple[Values, ...]:
        """The values that these are made of; none for those in a file."""

    def whole(self) -> Tensor:
        """Return all of them, in host memory."""
        return self.box((0,) * len(self.shape), self.shape)

    def box(self, offsets: Sizes, sizes: Sizes) -> Tensor:
        """Return a box of them, in host memory."""
        out = torch.empty(sizes, dtype=self.dtype, device="cpu")
        self.fill(out, offsets)
        return out

    def leaves(self) -> Iterator[Values]:
        """Yield the values that these come to in the end, those of files."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()


class _Moved(Values):
    """The elements of one tensor in another shape or order."""

    def __init__(self, source: Values, shape: Sequence[int]) -> None:
        super().__init__(shape, source.dtype)
        self.source = source

    @property
    def parts(self) -> tuple[Values, ...]:
        return (self.source,)


class _Narrowed(_Moved):
    """Some indices along one dimension."""

    def __init__(self, source: Values, dim: int, start: int, size: int) -> None:
        super().__init__(source, (*source.shape[:dim], size, *source.shape[dim + 1 :]))
        self._dim, self._start = dim, start

    def fill(self, out: Tensor, offsets: Sizes) -> None:
        dim = self._dim
        self.source.fill(out, (*offsets[:dim], offsets[dim] + self._start, *offsets[dim + 1 :]))


class _Permuted(_Moved):
    """Dimensions in another order."""

    def __init__(self, source: Values, dims: Sequence[int]) -> None:
        super().__init__(source, [source.shape[dim] for dim in dims])
        self._dims = tuple(dims)

    def fill(self, out: Tensor, offsets: Sizes) -> None:
        back = [self._dims.index(dim) for dim in range(len(self._dims))]
        self.source.fill(out.permute(back), tuple(offsets[place] for place in back))


class _Viewed(_Moved):
    """Another shape of the same elements in the same order."""

    def fill(self, out: Tensor, offsets: Sizes) -> None:
        if out.numel() == 0:
            return
        own = [size for size in self.shape if size != 1]
        if own == [size for size in self.source.shape if size != 1]:
            # dimensions of size 1 come and go; a box has offset 0 in them
            kept = iter([place for size, place in zip(self.shape, offsets, strict=True) if size != 1])
            sizes = iter([n for size, n in zip(self.shape, out.shape, strict=True) if size != 1])
            there = [(1, 0) if size == 1 else (next(sizes), next(kept)) for size in self.source.shape]
            # dimensions of size 1 can be viewed away at any strides
            self.source.fill(out.view([size for size, _ in there]), tuple(place for _, place in there))
            return
        runs = Runs(self.shape, offsets, tuple(out.shape))
        for place, start in runs.places(runs.dim):
            run = out.new_empty(runs.numel)
            for box in boxes_of(self.source.shape, start, start + runs.numel, max_numel=runs.numel):
                at = box.start - start
                self.source.fill(run[at : at + box.numel].view(box.sizes), box.offsets)
            out[place].copy_(run.view(out[place].shape))


class _Joined(Values):
    """Tensors behind each other along one dimension."""

    def __init__(self, sources: Sequence[Values], dim: int) -> None:
        first = sources[0].shape
        for one in sources:
            if (*one.shape[:dim], *one.shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]):
                raise RuntimeError(f"tensors of shapes {first} and {one.shape} do not fit together")
        dtype = sources[0].dtype
        for one in sources:
            dtype = torch.promote_types(dtype, one.dtype)
        length = sum(one.shape[dim] for one in sources)
        super().__init__((*first[:dim], length, *first[dim + 1 :]), dtype)
        self._sources, self._dim = tuple(sources), dim
        self._starts = tuple(accumulate((one.shape[dim] for one in sources), initial=0))

    @property
    def parts(self) -> tuple[Values, ...]:
        return self._sources

    def fill(self, out: Tensor, offsets: Sizes) -> None:
        dim, first = self._dim, offsets[self._dim]
        for start, source in zip(self._starts, self._sources, strict=False):
            low = max(first, start)
            high = min(first + out.shape[dim], start + source.shape[dim])
            if low < high:
                part = out.narrow(dim, low - first, high - low)
                source.fill(part, (*offsets[:dim], low - start, *offsets[dim + 1 :]))


class _Converted(_Moved):
    """The same elements in another dtype."""

    def __init__(self, source: Values, dtype: torch.dtype) -> None:
        super().__init__(source, source.shape)
        self.dtype = dtype

    def fill(self, out: Tensor, offsets: Sizes) -> None:
        if self.dtype == self.source.dtype or out.dtype == self.dtype:
            self.source.fill(out, offsets)
            return
        rounded = out.new_empty(out.shape, dtype=self.dtype)
        self.source.fill(rounded, offsets)
        out.copy_(rounded)


class _Computed(Values):
    """One result of an operation that computes."""

    def __init__(self, call: _Call, place: int, like: Tensor) -> None:
        super().__init__(like.shape, like.dtype)
        self._call, self._place = call, place

    @property
    def parts(self) -> tuple[Values, ...]:
        return self._call.parts

    def fill(self, out: Tensor, offsets: Sizes) -> None:
        value = self._call.results(Values.whole)[self._place]
        for dim, (start, size) in enumerate(zip(offsets, out.shape, strict=True)):
            value = value.narrow(dim, start, size)
        out.copy_(value)


class _Call:
    """An operation and its arguments."""

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
        self._func = func
        self._arguments, self._spec = pytree.tree_flatten((args, dict(kwargs)))
        self.parts = tuple(one.source for one in self._arguments if isinstance(one, FileTensor))

    def results(self, tensor_of: Callable[[Values], Tensor]) -> list[Tensor]:
        """Return what the operation makes of these tensors."""
        given = [tensor_of(one.source) if isinstance(one, FileTensor) else one for one in self._arguments]
        args, kwargs = pytree.tree_unflatten(given, self._spec)
        found = self._func(*args, **kwargs)
        return list(found) if isinstance(found, list | tuple) else [found]


class FileTensor(Tensor):
    """A tensor in host memory for those that ask, whose elements are read when they are wanted."""

    source: Values

    @staticmethod
    def __new__(cls, values: Values) -> FileTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: FileTensor = make(cls, values.shape, dtype=values.dtype, device="cpu")
        made.source = values
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FileTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        moves = _MOVES.get(func)
        if moves is not None:
            return moves(*args, **given)
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} writes to a tensor of a file")
        call = _Call(func, args, given)
        results = [
            cls(_Computed(call, place, like)) for place, like in enumerate(call.results(_without_values))
        ]
        returns = func._schema.returns
        return results[0] if len(returns) == 1 and str(returns[0].type) == "Tensor" else results


def _without_values(values: Values) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, device="meta")


# ---- operations that move elements; each gets the arguments of torch's own


def _same(one: FileTensor, *_: Any, **__: Any) -> FileTensor:
    return FileTensor(one.source)


def _to(one: FileTensor, *, dtype: torch.dtype | None = None, **_: Any) -> FileTensor:
    return FileTensor(_Converted(one.source, dtype or one.dtype))


def _cat(tensors: Sequence[FileTensor], dim: int = 0) -> FileTensor:
    values = [_values(one) for one in tensors]
    return FileTensor(_Joined(values, dim % len(values[0].shape)))


def _stack(tensors: Sequence[FileTensor], dim: int = 0) -> FileTensor:
    return _cat([_unsqueeze(one, dim) for one in tensors], dim % (tensors[0].dim() + 1))


def _narrow(one: FileTensor, dim: int, start: int, size: int) -> FileTensor:
    return FileTensor(_Narrowed(one.source, dim % one.dim(), start, size))


def _split_with_sizes(one: FileTensor, sizes: Sequence[int], dim: int = 0) -> list[FileTensor]:
    starts = accumulate(sizes, initial=0)
    return [_narrow(one, dim, start, size) for start, size in zip(starts, sizes, strict=False)]


def _split(one: FileTensor, size: int, dim: int = 0) -> list[FileTensor]:
    length = one.shape[dim]
    sizes = [min(size, length - start) for start in range(0, length, size)] if size else [length]
    return _split_with_sizes(one, sizes, dim)


def _slice(
    one: FileTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> FileTensor:
    if step != 1:
        raise NotImplementedError("slices with steps")
    low, high, _ = slice(start, end).indices(one.shape[dim])
    return _narrow(one, dim, low, max(0, high - low))


def _select(one: FileTensor, dim: int, index: int) -> FileTensor:
    return _squeeze(_narrow(one, dim, index % one.shape[dim], 1), dim)


def _unbind(one: FileTensor, dim: int = 0) -> list[FileTensor]:
    return [_select(one, dim, index) for index in range(one.shape[dim])]


def _permute(one: FileTensor, dims: Sequence[int]) -> FileTensor:
    return FileTensor(_Permuted(one.source, [dim % one.dim() for dim in dims]))


def _transpose(one: FileTensor, dim0: int, dim1: int) -> FileTensor:
    dims = list(range(one.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(one, dims)


def _t(one: FileTensor) -> FileTensor:
    return _same(one) if one.dim() < 2 else _transpose(one, 0, 1)


def _squeeze(one: FileTensor, dim: int) -> FileTensor:
    dim %= one.dim()
    shape = list(one.shape)
    if shape[dim] == 1:
        del shape[dim]
    return FileTensor(_Viewed(one.source, shape))


def _unsqueeze(one: FileTensor, dim: int) -> FileTensor:
    shape = list(one.shape)
    shape.insert(dim % (one.dim() + 1), 1)
    return FileTensor(_Viewed(one.source, shape))


def _view(one: FileTensor, shape: Sequence[int]) -> FileTensor:
    return FileTensor(_Viewed(one.source, _without_values(one.source).view(shape).shape))


def _values(one: Tensor) -> Values:
    if not isinstance(one, FileTensor):
        raise NotImplementedError("a tensor that is in no file")
    return one.source


_MOVES: dict[Any, Callable[..., Any]] = {
    _aten.alias.default: _same,
    _aten.cat.default: _cat,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _aten.permute.default: _permute,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.squeeze.dim: _squeeze,
    _aten.stack.default: _stack,
    _aten.t.default: _t,
    _aten._to_copy.default: _to,
    _aten.transpose.int: _transpose,
    _aten.unbind.int: _unbind,
    _aten._unsafe_view.default: _view,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.view.default: _view,
}


class Runs:
    """The parts of a box whose elements follow each other in the tensor."""

    def __init__(self, shape: Sizes, offsets: Sizes, sizes: Sizes) -> None:
        self.dim = len(shape)  # the parts lie along this dimension and those after it
        while self.dim > 0 and sizes[self.dim :] == shape[self.dim :]:
            self.dim -= 1
        self.numel = prod(sizes[self.dim :])  # number of elements of each
        self._sizes = sizes
        self._strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        self._first = sum(at * stride for at, stride in zip(offsets, self._strides, strict=True))

    def stride(self, dim: int) -> int:
        """Return how many elements of the tensor lie between two indices along this dimension."""
        return self._strides[dim] if self._strides else 1

    def places(self, dim: int) -> Iterator[tuple[Sizes, int]]:
        """Yield the indices of the box before this dimension, and the element of the tensor where what they
        lead to begins.
        """
        for place in product(*map(range, self._sizes[:dim])):
            yield (
                place,
                self._first + sum(at * stride for at, stride in zip(place, self._strides, strict=False)),
            )

"""Tensors of files moved by operations that are noted and not done: boxes of the result are torch's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch.runtime.checkpoint.pretrained.lazy import FileTensor, Sizes, Values

Make = Callable[[list[Any]], Any]


class Kept(Values):
    """Values in memory, of which the elements that were asked for are counted."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self.tensor, self.num_read = tensor, 0

    @property
    def parts(self) -> tuple[Values, ...]:
        return ()

    def fill(self, out: Tensor, offsets: Sizes) -> None:
        self.num_read += out.numel()
        part = self.tensor
        for dim, (start, size) in enumerate(zip(offsets, out.shape, strict=True)):
            part = part.narrow(dim, start, size)
        out.copy_(part)


def _numbered() -> list[Tensor]:
    return [torch.arange(24.0).view(4, 6) + 100 * place for place in range(3)]


def _rope(one: Any) -> Any:
    return one.view(2, 2, 1, 6).transpose(1, 2).reshape(4, 6)


MOVES: dict[str, Make] = {
    "stacked and joined": lambda t: torch.cat([torch.stack(t), torch.stack(t[::-1])], dim=1),
    "chunks": lambda t: torch.chunk(t[0], 3, dim=1)[1].contiguous(),
    "split by sizes": lambda t: torch.split(t[0], [1, 3], dim=0)[1],
    "unbound": lambda t: torch.unbind(torch.stack(t, dim=1), dim=1)[2],
    "squeezed": lambda t: torch.chunk(torch.stack(t), 3, dim=0)[1].squeeze(0),
    "transposed": lambda t: torch.stack(t).transpose(1, 2).contiguous(),
    "transposed, then joined": lambda t: torch.cat([one.t() for one in t]),
    "another shape": lambda t: torch.stack(t).reshape(9, 8)[2:7],
    "conv": lambda t: t[0].reshape(4, 1, 2, 3),
    "rope": lambda t: _rope(t[0]),
    "interleaved": lambda t: t[0].reshape(2, 2, 6).transpose(0, 1).reshape(4, 6).contiguous(),
    "rounded": lambda t: t[0].to(torch.bfloat16),
    "indexed": lambda t: torch.stack(t)[1][..., 2],
}


def _boxes(shape: Sizes) -> list[tuple[Sizes, Sizes]]:
    """The whole, and boxes that begin and end inside."""
    parts = [((0, size), (size // 2, size - size // 2), (0, max(1, size - 1))) for size in shape]
    return [(tuple(low for low, _ in box), tuple(size for _, size in box)) for box in product(*parts)]


@pytest.mark.parametrize("name", MOVES)
def test_a_box_of_moved_elements_is_read_and_nothing_else(name: str) -> None:
    tensors = _numbered()
    expected: Tensor = MOVES[name](tensors)
    kept = [Kept(one) for one in tensors]
    moved = MOVES[name]([FileTensor(one) for one in kept])
    assert (moved.shape, moved.dtype) == (expected.shape, expected.dtype)
    for offsets, sizes in _boxes(tuple(expected.shape)):
        before = sum(one.num_read for one in kept)
        box = moved.source.box(offsets, sizes)
        places = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        assert torch.equal(box, expected[places])
        assert sum(one.num_read for one in kept) - before == box.numel()


def test_what_is_computed_is_read_whole_and_what_writes_is_refused() -> None:
    kept = [Kept(one) for one in _numbered()]
    lazy = [FileTensor(one) for one in kept]
    summed = (lazy[0] * 2 + lazy[1]).t()
    expected = (kept[0].tensor * 2 + kept[1].tensor).t()
    assert torch.equal(summed.source.box((1, 2), (3, 2)), expected[1:4, 2:4])
    values, places = torch.max(lazy[0], dim=1)
    assert torch.equal(values.source.whole(), kept[0].tensor.amax(1))
    assert places.dtype == torch.int64
    with pytest.raises(NotImplementedError, match="writes to a tensor of a file"):
        lazy[0].mul_(2)

"""Check that a module takes the parts that a layer gives it for heads and positions as they are.

Attention with the number of heads in an attribute would take this rank's part of the queries, keys and values
for all heads of fewer positions: `keys.view(batch, -1, self.num_heads, head_dim)` fits, but mixes positions
up. So views of a column's output are checked: they must keep its positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import ConfigError

_PART = "_dslaunch_part"  # attribute of a tensor
_VIEWS: frozenset[Callable[..., Any]] = frozenset(
    (Tensor.view, Tensor.reshape, Tensor.unflatten, torch.reshape, torch.unflatten)
)


def note_part(output: Tensor, name: str, size: int) -> Tensor:
    """Mark and return the output of the column of this name, whose `size` elements the ranks hold
    together.
    """
    setattr(output, _PART, (name, size))
    return output


class ViewCheck(TorchFunctionMode):
    """Context of a forward that checks views.

    Errors: ConfigError that names the layer
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _VIEWS and args and (part := getattr(args[0], _PART, None)) is not None:
            _check(tuple(args[0].shape), tuple(result.shape), *part)
        return result


def _check(given: tuple[int, ...], made: tuple[int, ...], name: str, size: int) -> None:
    *positions, width = given
    if mixes_positions(given, made, size=size):
        raise ConfigError(
            f"'{name}' gives each rank {width} of {size} elements of its output, for {positions} positions, "
            f"and the module around it makes {list(made)} of them, in which positions are mixed up: it "
            "counts with all heads. Let it take their number from the shape, as in .view(batch, length, -1, "
            "head_dim), or leave the layer whole in tensor_parallel.partition_config"
        )


def mixes_positions(given: tuple[int, ...], made: tuple[int, ...], *, size: int) -> bool:
    """Tell whether a view mixes positions: whether it cuts parts, which have `given[-1]` of `size` elements
    each, at other places than their ends, or joins several parts into a whole.
    """
    positions = given[:-1]
    if len(made) < len(given) or made[: len(positions)] == positions or prod(given) == 0:
        return False
    starts = {prod(made[:index]) for index in range(len(made) + 1)}
    ends = {prod(made[index:]) for index in range(len(made))}
    return prod(positions) not in starts or (size in ends and len(given) > 2)

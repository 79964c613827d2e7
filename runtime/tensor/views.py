"""Check that a module takes the parts that a layer gives it for heads and positions as they are.

Attention whose number of heads is an attribute takes this rank's part of the queries, keys and values for all
heads of fewer positions: `keys.view(batch, -1, self.num_heads, head_dim)` fits, and mixes positions up. So
views of a column's output are looked at: its positions stay what they are.
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
    """Return the output of the column of this name, whose `size` elements the ranks have together."""
    setattr(output, _PART, (name, size))
    return output


class ViewCheck(TorchFunctionMode):
    """Context of a forward.

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
    """Whether a view of parts, `given[-1]` of `size` elements each, cuts them at other places than a part's
    end, or makes whole ones of several parts.
    """
    positions = given[:-1]
    if len(made) < len(given) or made[: len(positions)] == positions or prod(given) == 0:
        return False
    starts = {prod(made[:index]) for index in range(len(made) + 1)}
    ends = {prod(made[index:]) for index in range(len(made))}
    return prod(positions) not in starts or (size in ends and len(given) > 2)

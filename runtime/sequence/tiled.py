"""Computation in tiles along the sequence: only one tile of the largest activations exists at a time.

Each tile is a checkpointed function, so the backward computes it once more. Autograd adds up the tiles'
gradients of a parameter before its hooks run, so that ZeRO sees one gradient.

Source: DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py, the same calls
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError

Params = Sequence[nn.Parameter] | None


def sequence_tiled_compute(  # noqa: PLR0913  (DeepSpeed's signature)
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Params = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Apply `fn` to tiles of `kwargs_to_shard`; return the results put together along
    `output_unshard_dimension`, or stacked where that is 0, and then reduced.

    `grad_requiring_tensor_key` and `compute_params` have no effect: all tensors that `fn` uses get their
    gradients.

    Shapes: tensors to cut are [batch, seqlen, ...]
    Errors: ConfigError for another shape or reduction
    """
    _check_reduction(output_reduction, (None, "mean", "sum"))
    for name, value in kwargs_to_shard.items():
        if value.dim() < 2 or value.shape[1] != seqlen:
            raise ConfigError(
                f"sequence_tiled_compute(): {name} of shape {tuple(value.shape)} is not [batch, {seqlen}, "
                "...]"
            )
    size = _tile_size(seqlen, shards)
    tiles = [
        _tile(
            partial(fn, **kwargs_to_pass),
            {name: one[:, start : start + size] for name, one in kwargs_to_shard.items()},
        )
        for start in range(0, seqlen, size)
    ]
    whole = (
        torch.stack(tiles) if output_unshard_dimension == 0 else torch.cat(tiles, output_unshard_dimension)
    )
    return _reduced(whole, output_reduction)


class TiledMLP:
    """The MLP of a layer, in tiles."""

    @staticmethod
    def apply(
        fn: Callable[[nn.Module, Tensor], Tensor],
        module: nn.Module,
        x: Tensor,
        shards: int,
        compute_params: Params = None,
    ) -> Tensor:
        """Return `fn(module, x)`, computed in tiles along the dimension before the last one."""
        size = _tile_size(x.shape[-2], shards)
        return torch.cat(
            [_tile(partial(fn, module), {}, one) for one in torch.split(x, size, dim=-2)], dim=-2
        )


class TiledFusedLogitsLoss:
    """A head and its loss, in tiles: the logits of all positions never exist at once."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        module: nn.Module,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Params = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        """Return the mean or the sum of the results of `fn(module, x, y)`, or `fn(module, x, y, mask)`, for
        all tiles. A mean weighs tiles alike: if their numbers of labels differ, let `fn` return sums.

        Shapes: x [batch, sequence, ...], y [batch, sequence, ...], mask [batch, sequence]
        Errors: ConfigError for other shapes or reductions
        """
        _check_reduction(output_reduction, ("mean", "sum"))
        cut = [x, y] if mask is None else [x, y, mask]
        if x.dim() < 2 or any(one.shape[:2] != x.shape[:2] for one in cut):
            raise ConfigError(
                f"TiledFusedLogitsLoss: x, y and mask have to begin with [batch, sequence] alike; given are "
                f"{', '.join(str(tuple(one.shape)) for one in cut)}"
            )
        flat = [one.reshape(-1, *one.shape[2:]) for one in cut]
        size = _tile_size(flat[0].shape[0], shards)
        tiles = [
            _tile(partial(fn, module), {}, *parts)
            for parts in zip(*(torch.split(one, size) for one in flat), strict=True)
        ]
        return _reduced(torch.stack(tiles), output_reduction)


def _tile(fn: Callable[..., Tensor], kwargs: Mapping[str, Tensor], *args: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    result: Tensor = checkpoint(partial(fn, **kwargs), *args, use_reentrant=False)
    return result


def _tile_size(length: int, shards: int) -> int:
    if shards < 1:
        raise ConfigError(f"shards={shards}: there is at least one tile")
    return max(1, ceil(length / shards))


def _check_reduction(given: str | None, allowed: tuple[str | None, ...]) -> None:
    if given not in allowed:
        raise ConfigError(
            f"output_reduction={given!r} is not allowed; write one of {', '.join(map(repr, allowed))}"
        )


def _reduced(value: Tensor, how: str | None) -> Tensor:
    return value if how is None else value.mean() if how == "mean" else value.sum()

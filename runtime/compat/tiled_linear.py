"""A linear layer in tiles, so that stage 3 need never have the whole weight here at once.

Source: DeepSpeed 0.19.8 runtime/zero/tiling.py, `TiledLinear` and `TiledLinearReturnBias`: the same
        arguments, attributes, names of
parameters and methods to override
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..zero.gathered_parameters import GatheredParameters


class TiledLinear(nn.Module):
    """Linear layer like torch.nn.Linear, computed tile by tile: `linears[i][j]` makes part i of the outputs
    from part j of the inputs.
    """

    def __init__(  # noqa: PLR0913  (DeepSpeed's signature)
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """`input_is_already_split`: forward() is given the list of parts.

        `combine_out_splits` False: it returns such a list.

        `kwargs` go to each `linear_cls`; the values of `init_linear` are taken over.
        Errors: RuntimeError for more splits than features, or none
        """
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(
                    f"TiledLinear({name}_splits={splits}): must be from 1 to {name}_features, {features}; "
                    "give a number of tiles"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                # The bias is added once, with the last part of the inputs.
                linear_cls(right - left, bottom - top, bias=bias and right == in_features, **kwargs)
                for left, right in pairwise(self.in_parts)
            )
            for top, bottom in pairwise(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Return the result of torch.nn.Linear, up to the order of sums.

        Errors: ConfigError for another number of parts than `in_splits`
        """
        inputs = self._inputs(input_)
        outputs: list[Any] = []
        for row in self._rows:
            output = None
            for column, linear in enumerate(row):
                part = linear(inputs[column])
                output = self._reduce_local_output(
                    in_id=column, out_id=len(outputs), current_out=output, new_out=part
                )
            outputs.append(output)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    @property
    def _rows(self) -> list[list[nn.Module]]:
        return [list(row.children()) for row in self.linears]

    def _inputs(self, input_: Any) -> Sequence[Any]:
        if self.in_splits == 1:
            return [input_]
        if not self.input_is_already_split:
            return self._split_global_input(input_, [right - left for left, right in pairwise(self.in_parts)])
        if len(input_) != self.in_splits:
            raise ConfigError(
                f"TiledLinear was given {len(input_)} parts of inputs, and in_splits is {self.in_splits}; "
                "give as many parts"
            )
        parts: Sequence[Any] = input_
        return parts

    def _split_global_input(self, input: Any, split_sizes: list[int]) -> Sequence[Any]:
        """Return the parts of the inputs, along the last dimension. Subclasses may do it in another way."""
        parts: Sequence[Tensor] = torch.split(input, split_sizes, dim=-1)
        return parts

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """Return the sum so far with one more tile's output. Subclasses may do it in another way."""
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        """Return the parts of the outputs as one. Subclasses may do it in another way."""
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take over weight and bias of a linear layer; at stage 3, and inside zero.Init,
        all ranks get rank 0's.

        Order:  a collective at stage 3
        Errors: ConfigError for another shape, or a bias on one side only
        """
        weight, bias = other.weight, other.bias
        if not isinstance(weight, Tensor) or (bias is not None) is not self.use_bias:
            raise ConfigError(
                f"TiledLinear(bias={self.use_bias}).copy_params_from({other}): both need a bias, or "
                "neither; change bias"
            )
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ConfigError(
                f"TiledLinear.copy_params_from(): the weight is {list(weight.shape)} and must be "
                f"[{self.out_features}, {self.in_features}]; give a layer of that size"
            )
        with GatheredParameters(other.parameters()):
            for row, (top, bottom) in zip(self._rows, pairwise(self.out_parts), strict=True):
                for tile, (left, right) in zip(row, pairwise(self.in_parts), strict=True):
                    with GatheredParameters(tile.parameters(), modifier_rank=0):
                        values = dict(tile.named_parameters())
                        values["weight"].copy_(weight[top:bottom, left:right])
                        if isinstance(bias, Tensor) and "bias" in values:
                            values["bias"].copy_(bias[top:bottom])


class TiledLinearReturnBias(TiledLinear):
    """Tiled linear layer that returns (output, bias) and leaves adding the bias to its caller,
    as Megatron-LM's do.
    """

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        output, bias = new_out
        before, old_bias = (None, None) if current_out is None else current_out
        total = super()._reduce_local_output(in_id=in_id, out_id=out_id, current_out=before, new_out=output)
        return total, old_bias if bias is None else bias

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        combined = super()._combine_output_splits([output for output, _ in outputs])
        return combined, super()._combine_output_splits(biases) if biases else None


def _bounds(features: int, splits: int) -> list[int]:
    """Return where each part begins, and the end: the first parts are one longer where it does
    not come out even.
    """
    even, rest = divmod(features, splits)
    return [0, *accumulate(even + (place < rest) for place in range(splits))]

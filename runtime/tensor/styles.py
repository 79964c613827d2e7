"""Styles: how a module that holds parts of its parameters computes.

The names are those of Hugging Face's plans, in which a style of a parameter says how that is cut, and a style
of a module how its inputs and outputs are treated.

Code that sends is left out of torch.compile's graphs, so a graph ends at each divided layer. torch.compile
would then compile that layer's `__call__` by itself, anew for each layer, and give up at the eighth.

Source: transformers 5.23 distributed/tensor_parallel.py, the styles of these names but for those of
        known_plans.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from ..zero.access.module_parameters import parameters_of
from ..zero.parameters.uncompiled import uncompiled
from .exchange import TensorAxis
from .lower import Division
from .part_gradients import add_over_ranks
from .views import note_part

# tensors that were put together along a dimension: so many of equal size, or of these sizes
Packs = int | tuple[int, ...]
# attributes that count heads, or their elements
_OF_HEADS = ("num_heads", "n_heads", "num_attention_heads", "split_size")
# Maps a parameter's shape to the dimension that is cut, and what was put together along it; None: it stays
# whole.
CutRule = Callable[[tuple[int, ...]], tuple[int, Packs] | None]


def _along_output(num_packs: int) -> CutRule:
    return lambda shape: (-1, 1) if len(shape) == 1 else (len(shape) - 2, num_packs)


def _along_input(num_packs: int) -> CutRule:
    return lambda shape: None if len(shape) == 1 else (-1, num_packs)


def _along_last(num_packs: int) -> CutRule:
    return lambda shape: (-1, num_packs)


def _whole(shape: tuple[int, ...]) -> None:
    return None


class Divided:
    """The forward of a module in a style; `forward` is the previous one."""

    def __init__(self, module: nn.Module, axis: TensorAxis, name: str, division: Division) -> None:
        self.module: Any = module
        self.axis, self.name, self.division = axis, name, division
        self.forward: Callable[..., Any] = module.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the forward of the copy of the module, which is plain if it has whole parameters."""
        module = memo[id(self.module)]
        forward: Callable[..., Any] = type(module).forward.__get__(module)
        if self.division.is_whole():
            return forward
        copy = object.__new__(type(self))
        memo[id(self)] = copy
        vars(copy).update(vars(self))
        copy.module, copy.forward = module, forward
        return copy

    @partial(uncompiled, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class Column(Divided):
    """Style in which each rank computes a different part of the output."""

    @uncompiled
    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.shape[-1] != self.module.in_features:
            raise ConfigError(
                f"'{self.name}' is divided by columns and takes all {self.module.in_features} elements of "
                f"its input, and it was given {input.shape[-1]}: divide by rows the layer that takes parts, "
                'or give the layer that makes its input the rule "gather_output": true'
            )
        output = self.forward(self.axis.enter(input, f"the input of '{self.name}'"), *args, **kwargs)
        return note_part(output, self.name, self.module.out_features)


class GatheredColumn(Column):
    """Column style in which the parts of the output are joined."""

    @uncompiled
    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(input, *args, **kwargs)
        add_over_ranks(output, self.axis, self.name, self.division)
        return self.axis.gather(output, self.module.out_features, f"the output of '{self.name}'")


class Row(Divided):
    """Style in which each rank has a different part of the input, and the outputs are added; the bias is
    added afterwards.
    """

    @uncompiled
    def __call__(self, input: Tensor) -> Any:
        weight = self.module.weight
        if input.shape[-1] != weight.shape[-1]:
            raise ConfigError(
                f"'{self.name}' is divided by rows and takes this rank's {weight.shape[-1]} of "
                f"{self.module.in_features} elements of its input, and it was given {input.shape[-1]}: "
                "divide by columns the layer that makes its input, or leave it whole"
            )
        output = F.linear(input, weight)
        add_over_ranks(output, self.axis, self.name, self.division)
        output = self.axis.leave(output, f"the output of '{self.name}'")
        bias = self.module.bias
        return output if bias is None else output + bias


class SplitRow(Row):
    """Row style in which each rank takes its part of an input that is the same on all."""

    @uncompiled
    def __call__(self, input: Tensor) -> Any:
        return super().__call__(self.axis.split(input, f"the input of '{self.name}'"))


class ConvColumn(Column):
    """Column style of GPT-2's Conv1D, whose weight is [in, out]."""

    @uncompiled
    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        input = self.axis.enter(input, f"the input of '{self.name}'")
        output = F.linear(input, self.module.weight.t(), self.module.bias)
        return note_part(output, self.name, self.module.nf)


class ConvRow(Divided):
    """Row style of GPT-2's Conv1D."""

    @uncompiled
    def __call__(self, input: Tensor) -> Any:
        output = F.linear(input, self.module.weight.t())
        add_over_ranks(output, self.axis, self.name, self.division)
        return self.axis.leave(output, f"the output of '{self.name}'") + self.module.bias


class LocalHeads(Divided):
    """Style of attention with its number of heads in attributes: while it computes, they are of this rank."""

    @partial(uncompiled, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = {name: getattr(self.module, name, None) for name in _OF_HEADS}
        whole = {name: value for name, value in values.items() if isinstance(value, int)}
        try:
            for name, value in whole.items():
                setattr(self.module, name, value // self.axis.size)
            return self.forward(*args, **kwargs)
        finally:
            for name, value in whole.items():
                setattr(self.module, name, value)


class VocabularyRows(Divided):
    """Style of an embedding of which each rank has different rows."""

    @uncompiled
    def __call__(self, input: Tensor) -> Any:
        module, num_rows = self.module, self.module.weight.shape[0]
        self._check(input)
        first = self.axis.index * -(-module.num_embeddings // self.axis.size)
        local = input - first
        is_elsewhere = (local < 0) | (local >= num_rows)
        padding = module.padding_idx
        is_padding_here = padding is not None and 0 <= padding - first < num_rows
        # A subclass may do more than look up rows: Gemma's scales them. So its own forward runs.
        module.padding_idx = padding - first if is_padding_here else None
        try:
            rows = self.forward(local.masked_fill(is_elsewhere, 0))
        finally:
            module.padding_idx = padding
        rows = rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        return self.axis.leave(rows, f"the output of '{self.name}'")

    def _check(self, input: Tensor) -> None:
        """Errors: IndexError, as torch has it for a whole embedding; on a GPU its kernel's assertion"""
        num_rows = self.module.num_embeddings
        is_here = ((input >= 0) & (input < num_rows)).all()
        if input.is_cuda:
            torch._assert_async(is_here)  # nothing waits for it
        elif not is_here:
            raise IndexError(
                f"index out of range in embedding '{self.name}': it has {num_rows} rows, and was given "
                f"{int(input.min())} to {int(input.max())}"
            )


class EmbeddingColumns(Divided):
    """Style of an embedding of which each rank has a different part of every row."""

    @uncompiled
    def __call__(self, input: Tensor) -> Any:
        output = self.forward(input)
        return self.axis.gather(output, self.module.embedding_dim, f"the output of '{self.name}'")


class ExpertParts(Divided):
    """Style in which each rank computes its part of every expert."""

    @partial(uncompiled, recursive=False)
    def __call__(self, hidden: Tensor, *routing: Any, **kwargs: Any) -> Any:
        hidden = self.axis.enter(hidden, f"the input of '{self.name}'")
        if len(routing) >= 2:  # the chosen experts, and their weights
            chosen, weights, *rest = routing
            routing = (chosen, self.axis.enter(weights, f"the weights of '{self.name}'"), *rest)
        output = self.forward(hidden, *routing, **kwargs)
        add_over_ranks(output, self.axis, self.name, self.division)
        return self.axis.leave(output, f"the output of '{self.name}'")


class IdentityExpert(Divided):
    """Style of an expert that returns its input; its output is added over the ranks with the others'."""

    @partial(uncompiled, recursive=False)
    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.forward(input / self.axis.size, *args, **kwargs)


class Summed(Divided):
    """Style in which the ranks' outputs are added."""

    @partial(uncompiled, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.forward(*args, **kwargs)
        return None if output is None else self.axis.leave(output, f"the output of '{self.name}'")


class PartlyRotated(Divided):
    """Style for multi-head latent attention: all ranks' heads get the last elements of the output
    unchanged.
    """

    def __init__(
        self, module: nn.Module, axis: TensorAxis, name: str, division: Division, *, rope_size: int
    ) -> None:
        super().__init__(module, axis, name, division)
        self.rope_size = rope_size

    @partial(uncompiled, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.forward(*args, **kwargs)
        passed, rotated = output.split([output.shape[-1] - self.rope_size, self.rope_size], dim=-1)
        return torch.cat([passed, self.axis.enter(rotated, f"the output of '{self.name}'")], dim=-1)


class PartialGradients(Divided):
    """Style of whole parameters that each rank uses for its own part; their gradients are added."""

    def __init__(self, module: nn.Module, axis: TensorAxis, name: str, division: Division) -> None:
        super().__init__(module, axis, name, division)
        for param in module._parameters:
            enter = partial(axis.enter, what=f"parameter '{name}.{param}'")
            parameters_of(module).shows[param] = enter


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """A style: `cut` for a parameter, `forward` for a module."""

    cut: CutRule = _whole
    forward: type[Divided] | None = None
    # the module must be an instance of one of these classes
    kinds: tuple[type[nn.Module], ...] = (nn.Module,)


STYLES: Mapping[str, Style] = {
    "colwise": Style(cut=_along_output(1), forward=Column, kinds=(nn.Linear,)),
    "colwise_gather_output": Style(cut=_along_output(1), forward=GatheredColumn, kinds=(nn.Linear,)),
    "colwise_rep": Style(cut=_along_output(1), forward=GatheredColumn, kinds=(nn.Linear,)),
    "packed_colwise": Style(cut=_along_output(2), forward=Column, kinds=(nn.Linear,)),
    "rowwise": Style(cut=_along_input(1), forward=Row, kinds=(nn.Linear,)),
    "rowwise_split_input": Style(cut=_along_input(1), forward=SplitRow, kinds=(nn.Linear,)),
    "rowwise_rep": Style(cut=_along_input(1), forward=SplitRow, kinds=(nn.Linear,)),
    "packed_rowwise": Style(cut=_along_input(2), forward=None),
    "conv1d_colwise": Style(cut=_along_last(1), forward=ConvColumn),
    "conv1d_packed_2_colwise": Style(cut=_along_last(2), forward=ConvColumn),
    "conv1d_packed_3_colwise": Style(cut=_along_last(3), forward=ConvColumn),
    "conv1d_rowwise": Style(cut=lambda shape: None if len(shape) == 1 else (0, 1), forward=ConvRow),
    "local_heads": Style(forward=LocalHeads),
    "embedding_heads": Style(cut=lambda shape: (1, 1), kinds=(nn.Embedding,)),
    "embedding_rowwise": Style(cut=lambda shape: (0, 1), forward=VocabularyRows, kinds=(nn.Embedding,)),
    "embedding_colwise": Style(cut=lambda shape: (1, 1), forward=EmbeddingColumns, kinds=(nn.Embedding,)),
    "moe_tp_experts": Style(forward=ExpertParts),
    "moe_identity_expert": Style(forward=IdentityExpert),
    "all_reduce": Style(forward=Summed),
    "mla_kv_a_proj": Style(forward=PartlyRotated),
    "replicated_with_grad_allreduce": Style(forward=PartialGradients),
    "local_params": Style(),
    "replicate": Style(),
}

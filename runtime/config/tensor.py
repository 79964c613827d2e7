"""tensor_parallel: which layers are divided over ranks, and over how many."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from .keys.value import Bool, Count, Positive, Texts, choice, show, show_name
from .section import Section

_PARTITION_TYPE = choice("column", "row", "skip")
SubSizes = int | tuple[int, ...]


def _patterns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(pattern, str) for pattern in value):
        raise ValueError("is not a list of regular expressions")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"has {pattern!r}, which is no regular expression: {error}") from error
    return tuple(value)


def _shape(value: Any) -> tuple[SubSizes, ...] | None:
    if value is None:
        return None
    is_list = isinstance(value, list | tuple) and value
    if not is_list or not all(_is_size(one) or _are_sizes(one) for one in value):
        raise ValueError("is not a list of sizes, as [2, -1] or [[4096, 1024, 1024], -1]")
    return tuple(tuple(one) if isinstance(one, list | tuple) else one for one in value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (value > 0 or value == -1)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_size(one) and one > 0 for one in value)


class LayerRule(Section):
    """Division of the layers with these names."""

    patterns: Annotated[tuple[str, ...], BeforeValidator(_patterns)]
    """Regular expressions that the name of a weight begins with, ".*o_proj.weight$" for example."""
    partition_type: Annotated[str, BeforeValidator(_PARTITION_TYPE.read)] = "column"
    shape: Annotated[tuple[SubSizes, ...] | None, BeforeValidator(_shape)] = None
    """The weight as tensors that were put together: 2 equal ones are [2, -1]."""
    partition_dim: Count | None = None
    gather_output: Bool = False
    grad_allreduce: Bool = False
    """With skip: each rank uses the whole weight for its own part, so its gradients are added."""
    model_types: Texts | None = None
    """Restrict the rule to models whose config has one of these as model_type."""

    @property
    def packs(self) -> int | tuple[int, ...]:
        """Into how many equal parts the divided dimension falls, or into parts of which sizes."""
        return 1 if self.shape is None else self.shape[self.dim]

    @property
    def dim(self) -> int:
        """The dimension of the weight that is divided."""
        default = 1 if self.partition_type == "row" else 0
        return default if self.partition_dim is None else self.partition_dim

    @model_validator(mode="after")
    def _fits(self) -> LayerRule:
        if self.partition_type == "skip":
            return self
        if self.grad_allreduce:
            raise ValueError('grad_allreduce is for partition_type "skip": divided layers need none')
        if self.dim != (1 if self.partition_type == "row" else 0):
            raise ValueError(
                f"partition_dim {self.dim} does not fit {self.partition_type}: a column has 0, a row 1"
            )
        if self.gather_output and self.partition_type != "column":
            raise ValueError('gather_output is for partition_type "column": a row\'s output is whole')
        if self.shape is not None and (len(self.shape) != 2 or self.shape[1 - self.dim] != -1):
            raise ValueError(
                f"shape {list(self.shape)}: give two sizes, -1 for the dimension of the weight that is not "
                "divided"
            )
        if self.packs == -1:
            raise ValueError(f"shape {list(self.shape or ())}: -1 says nothing about the divided dimension")
        return self


def _rules(value: Any) -> tuple[LayerRule, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("is not a list of objects")
    return tuple(
        one if isinstance(one, LayerRule) else _rule(number, one) for number, one in enumerate(value)
    )


def _rule(number: int, value: Any) -> LayerRule:
    if not isinstance(value, dict):
        raise ValueError(f"has {show(value)} as rule {number}, which is not an object: {{ ... }}")
    for name in value:
        if name not in LayerRule.model_fields:
            raise ValueError(
                f"has {show_name(str(name))} in rule {number}, which is not a known key; known: "
                f"{', '.join(LayerRule.model_fields)}"
            )
    try:
        return LayerRule.model_validate(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        said = fault["ctx"]["error"] if fault["type"] == "value_error" else "is missing"
        raise ValueError(f"has in rule {number}: {key} {said}".replace("  ", " ")) from None


class PartitionConfig(Section):
    """Rules of the ds_config, the first that fits counts."""

    layer_specs: Annotated[tuple[LayerRule, ...], BeforeValidator(_rules)] = ()
    """rules in place of the model's plan: objects with patterns, partition_type (column, row or skip), shape,
    partition_dim, gather_output, grad_allreduce and model_types; the first one that fits counts"""


class AxisConfig(Section):
    """DeepSpeed's other spelling of the size."""

    tp_size: Positive = 1
    """another spelling of autotp_size"""


class TensorParallelConfig(Section):
    """Divide layers over the ranks of the axis tp."""

    autotp_size: Count = 0
    """so many ranks hold one copy of the model together, each a part of the layers that the model's plan
    names; 0, as if left out, divides nothing"""
    axis: AxisConfig | None = Field(default=None, alias="tp")
    partition_config: PartitionConfig | None = None
    vocab_parallel_lm_head: Bool = False
    """the loss is computed from parts of the logits, which are never put together; for a Hugging Face causal
    model, whose output then has this rank's part; false if left out"""

    @property
    def size(self) -> int:
        """The ranks of the axis."""
        return max(self.autotp_size, 1 if self.axis is None else self.axis.tp_size, 1)

    @model_validator(mode="after")
    def _one_size(self) -> TensorParallelConfig:
        other = None if self.axis is None else self.axis.tp_size
        if other is not None and self.autotp_size > 0 and other != self.autotp_size:
            raise ValueError(
                f"tensor_parallel.autotp_size {self.autotp_size} and tensor_parallel.tp.tp_size {other} are "
                "two sizes of one axis: give one of them"
            )
        return self

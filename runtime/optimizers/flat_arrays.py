"""Arguments of a formula: flat arrays, and which of their elements are updated by which numbers.

Letters: n = elements of one array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Group = Mapping[str, Any]  # hyper-parameters


@dataclass(slots=True, kw_only=True)  # not frozen, like the next class: thousands are made in each step
class ElementRun:
    """The elements [offset, offset + numel), with the arguments of their update; `step` counts from 1.

    With a `seed`, of one parameter in one step, values in 16 bits are rounded by random bits; `first` is the
    place of the first element in its parameter. See random_bits.py.
    """

    offset: int
    numel: int
    group: Group
    step: int
    seed: int | None = None
    first: int = 0


@dataclass(slots=True, kw_only=True)
class FlatArrays:
    """Arrays of a shard, or of one parameter. Elements in no run, or without a gradient, stay as they are."""

    param: Tensor  # [n] float32, or bfloat16 where runs have seeds; contiguous, updated in place
    grads: tuple[tuple[int, Tensor], ...]  # (begin, piece [k] of float32, bfloat16 or float16)
    # name -> [n] float32, or all bfloat16, updated in place; or all uint8, with scales under names of their
    # own (eight_bits.py), in runs with seeds that begin at multiples of 256
    states: Mapping[str, Tensor]
    runs: tuple[ElementRun, ...]
    param_out: Tensor | None = None  # [n] bfloat16 or float16: the result, rounded to nearest even

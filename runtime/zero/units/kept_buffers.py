"""Buffers that stay float32 in a model of 16 bits, because the ds_config or the model names them.

A model of transformers lists patterns of names: `_keep_in_fp32_modules_strict`, and `_keep_in_fp32_modules`
for float16 alone. The usual one is the bias by which a router of experts chooses, whose values differ by less
than bfloat16 can tell.

Source: DeepSpeed 0.19.8, `data_types.keep_in_fp32_modules`; transformers 5, how it reads these lists
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ...errors import ConfigError


def kept_buffers(
    module: nn.Module, patterns: Sequence[str] | None, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return the floating-point buffers that a model trained in `dtype` keeps in float32; None as `patterns`:
    those that it lists.

    Errors: ConfigError for a pattern that is no regular expression
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return []
    searched = list(_listed(module, dtype)) if patterns is None else [_expression(one) for one in patterns]
    if not searched:
        return []
    try:
        pattern = re.compile("|".join(searched))
    except re.error as error:
        raise ConfigError(
            f"data_types.keep_in_fp32_modules {', '.join(patterns or searched)}: {error}; write names of "
            "buffers, with * for any characters"
        ) from error
    return [one for name, one in module.named_buffers() if one.is_floating_point() and pattern.search(name)]


def _listed(module: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    lists = ["_keep_in_fp32_modules_strict", *["_keep_in_fp32_modules"] * (dtype == torch.float16)]
    for name, inner in module.named_modules():
        below = f"^{re.escape(name)}\\..*" if name else ""  # an inner model lists names of its own
        for attribute in lists:
            yield from (below + _expression(one) for one in getattr(inner, attribute, None) or ())


def _expression(pattern: str) -> str:
    return pattern.replace("*", ".*")

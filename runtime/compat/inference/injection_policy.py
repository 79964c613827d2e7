"""`injection_policy` of DeepSpeed: which linear layers of a block add up over ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...errors import ConfigError
from ...tensor.plan import plan_of_model

Rules = tuple[Mapping[str, Any], ...]


def rules_of_policy(policy: Mapping[Any, Any], model: nn.Module, *, tp_size: int) -> tuple[Rules, str]:
    """Return rules for `tensor_parallel.partition_config`, and what is to be told.

    A policy names, for a class of blocks, the linear layers whose outputs are added up; all other linear
    layers of such a block give each rank a part of their output. A model's own plan goes before it.
    Errors: ConfigError for a class without blocks in the model, and for a name that is in none of them
    """
    if tp_size == 1:
        return (), ""
    if plan_of_model(model):
        return (), f"injection_policy: there is a plan for {type(model).__name__}, which is taken"
    rows: list[str] = []
    columns: list[str] = []
    for kind, given in policy.items():
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise ConfigError(
                f"init_inference(injection_policy=...): {kind!r} is not a class of modules; give "
                "{Block: ('names', 'of the linear layers', 'that end its parts')}"
            )
        names = (given,) if isinstance(given, str) else tuple(given)
        inside = _linears_in(model, kind)
        for name in names:
            if not any(linear.endswith(name) for linear in inside):
                known = sorted({re.sub(r"[.][0-9]+(?=[.])", ".*", linear) for linear in inside})
                raise ConfigError(
                    f"init_inference(injection_policy={{{kind.__name__}: {names!r}}}): no linear layer of a "
                    f"{kind.__name__} of this model ends in {name!r}; there are {', '.join(known) or 'none'}"
                )
        for linear in inside:
            (rows if linear.endswith(names) else columns).append(linear)
    return (
        {"patterns": [f"{re.escape(name)}\\.weight$" for name in rows], "partition_type": "row"},
        {"patterns": [f"{re.escape(name)}\\.weight$" for name in columns], "partition_type": "column"},
    ), ""


def _linears_in(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [
        f"{prefix}.{name}"
        for prefix, block in model.named_modules()
        if isinstance(block, kind)
        for name, one in block.named_modules()
        if isinstance(one, nn.Linear)
    ]

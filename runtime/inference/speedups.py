"""Ways in which a model answers faster, in place of DeepSpeed's kernels: attention by torch's fused kernels,
a static cache, by which transformers records CUDA graphs, and torch.compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from .options import InferenceOptions

FUSED = "sdpa"  # transformers' name of torch's scaled_dot_product_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedups:
    """Ways that are taken for one model; `notes` say which, and what has no effect."""

    attention: str | None = None
    static_cache: bool = False
    compiles: bool = False
    notes: tuple[str, ...] = ()


class ModelFacts(NamedTuple):
    """Facts that the choice depends on."""

    is_on_gpu: bool
    attention: str | None  # the model's present one, by transformers' names; None: it has no choice
    has_fused: bool  # it can take FUSED
    generates: bool  # by transformers
    is_divided: bool  # over ranks
    is_streamed: bool  # its weights have other addresses at each use


def facts_of(module: nn.Module, options: InferenceOptions, device: torch.device) -> ModelFacts:
    """Look at a model."""
    config: Any = getattr(module, "config", None)
    return ModelFacts(
        is_on_gpu=device.type == "cuda",
        attention=getattr(config, "_attn_implementation", None),
        has_fused=bool(getattr(module, "_supports_sdpa", False)),
        generates=hasattr(module, "generate") and hasattr(module, "generation_config"),
        is_divided=options.tp_size > 1,
        is_streamed=options.offload is not None or options.zero.get("stage") == 3,
    )


def plan_speedups(options: InferenceOptions, facts: ModelFacts) -> Speedups:
    """Return what is done for what was asked for."""
    notes: list[str] = []
    attention = None
    if options.kernels:
        attention = FUSED if facts.attention == "eager" and facts.has_fused else None
        taken = attention or facts.attention
        notes.append(
            f"replace_with_kernel_inject: attention by {taken}"
            if taken
            else "replace_with_kernel_inject: no effect, the model has no choice of attention"
        )
    static_cache = compiles = False
    for is_asked, name in ((options.graphs, "enable_cuda_graph"), (options.compiles, "use_triton")):
        if not is_asked:
            continue
        why_not = _why_not(facts)
        if why_not:
            notes.append(f"{name}: no effect, {why_not}")
        elif facts.generates:
            static_cache = True
            notes.append(
                f"{name}: generate() takes a static cache, for which transformers compiles the model"
            )
        else:
            compiles = True
            notes.append(f"{name}: torch.compile")
    return Speedups(
        attention=attention, static_cache=static_cache, compiles=compiles, notes=(*notes, *options.notes)
    )


def _why_not(facts: ModelFacts) -> str:
    if not facts.is_on_gpu:
        return "there is no GPU"
    if facts.is_divided:
        return "layers are divided over ranks"
    return "weights have other addresses at each use" if facts.is_streamed else ""

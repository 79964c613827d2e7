"""Fused operations that torch chooses by device, chosen for a device that is not there."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from .without_values import WithoutValues

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLASH = 1  # torch's number of that kernel
_FLASH_HEAD = 256  # elements of a head that flash attention takes


def _is_fused_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float
) -> bool:
    """Whether torch takes its flash attention for CPUs.

    Source: torch's sdp_utils_cpp.cpp, use_flash_attention_cpp()
    """
    given = (query, key, value)
    return (
        query.is_cpu
        and query.is_floating_point()
        and dropout_p == 0
        and all(one.dim() == 4 and one.stride(-1) == 1 and 0 not in one.shape for one in given)
        and all(one.shape[0] == query.shape[0] and one.shape[-1] == query.shape[-1] for one in given)
        and key.shape[1] == value.shape[1]
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
    )


def choose_attention(mode: WithoutValues) -> None:
    """Have scaled_dot_product_attention() take the kernel that torch takes on a GPU, or on a CPU.

    Source: torch's sdp_utils.cpp: flash attention for 16 bits without a mask, else the memory-efficient one
    """
    plain = functional.scaled_dot_product_attention
    heads, groups = (torch.empty(1, number, 2, 8, device="cpu") for number in (2, 1))
    takes_groups = torch._fused_sdp_choice(heads, groups, groups, enable_gqa=True) == _FLASH

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the attended values."""
        are_heads_alike = query.shape[1:2] == key.shape[1:2]
        if (are_heads_alike or (enable_gqa and takes_groups)) and _is_fused_on_cpu(
            query, key, value, attn_mask, dropout_p
        ):
            if attn_mask is not None and attn_mask.dtype is torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
            on_cpu: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
            return on_cpu
        if not query.is_cuda or query.dim() != 4:
            return plain(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa and key.shape[1] != query.shape[1]:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        width = query.shape[-1]
        scale = 1 / math.sqrt(width) if scale is None else scale
        if attn_mask is None and query.dtype in _HALF and width <= _FLASH_HEAD:
            padded = [
                functional.pad(one, (0, -width % 8)) if width % 8 else one for one in (query, key, value)
            ]
            out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[
                0
            ]
            cut: Tensor = out[..., :width] if width % 8 else out
            return cut
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
            attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        needs_lse = any(one.requires_grad for one in (query, key, value)) and torch.is_grad_enabled()
        attended: Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, needs_lse, dropout_p, is_causal, scale=scale
        )[0]
        return attended

    functional.scaled_dot_product_attention = attention

"""Attention over sequences that are divided over ranks: each rank computes some heads of whole sequences.

[batch, heads, a part of the sequence, head_dim] becomes [batch, a part of the heads, the sequence,
head_dim], and the result is exchanged back. If keys and values have fewer heads than there are ranks, they
are repeated, and the gradients of the copies are added up.

Source: Jacobs et al. 2023 (DeepSpeed-Ulysses); DeepSpeed 0.19.8 sequence/layer.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..environment import computes_plainly
from ..errors import ConfigError
from .exchange import DimExchange, SequenceRanks, Sizes, exchange
from .plain_attention import attend_on_wholes


def sizes_of_heads(num_heads: int, num_kv_heads: int, ranks: SequenceRanks) -> tuple[Sizes, Sizes, int]:
    """Return how many heads of queries each rank computes, how many of keys and values, and how often keys
    and values are repeated first.

    Errors: ConfigError if heads that belong together cannot stay together
    """
    size = ranks.size
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} heads of queries do not share {num_kv_heads} heads of keys evenly")
    if num_kv_heads >= size:
        kv_sizes, group = ranks.even(num_kv_heads), num_heads // num_kv_heads
        return tuple(group * one for one in kv_sizes), kv_sizes, 1
    if size % num_kv_heads or num_heads % size:
        raise ConfigError(
            f"{num_heads} attention heads with {num_kv_heads} of keys and values cannot be divided over "
            f"{size} ranks: the ranks that share a sequence divide the heads, and heads of keys divide the "
            "ranks where there are fewer; choose another sequence_parallel_size"
        )
    return ranks.even(num_heads), (1,) * size, size // num_kv_heads


def attend_over_ranks(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranks: SequenceRanks,
    *,
    head_dim: int,
    sequence_dim: int,
    result_dims: tuple[int, int],
) -> Tensor:
    """Run `attend` on whole sequences, and return this rank's part of its result. `result_dims` are the
    dimensions of heads and sequence in that result.

    Errors: ConfigError for heads that cannot be divided, or if query, key and value do not fit each other
    """
    if computes_plainly():
        return attend_on_wholes(
            attend, (query, key, value), ranks.group, dim=sequence_dim, result_dim=result_dims[1]
        )
    q_sizes, kv_sizes, times = sizes_of_heads(query.shape[head_dim], key.shape[head_dim], ranks)
    lengths = (query.shape[sequence_dim],) * ranks.size
    if times > 1:
        key, value = (one.repeat_interleave(times, dim=head_dim) for one in (key, value))
    sent, sequences = (query, key, value), (sequence_dim, lengths)
    cuts = [DimExchange((head_dim, sizes), sequences) for sizes in (q_sizes, kv_sizes, kv_sizes)]
    result = attend(*exchange(sent, ranks, cuts, "queries, keys and values"))
    heads, sequence = result_dims
    in_result = tuple(one * (result.shape[heads] // q_sizes[ranks.index]) for one in q_sizes)
    (part,) = exchange([result], ranks, [DimExchange((sequence, lengths), (heads, in_result))], "attention")
    return part


class DistributedAttention(nn.Module):
    """A layer around an attention that computes on whole sequences."""

    def __init__(
        self,
        local_attention: nn.Module | Callable[..., Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """`sp_stream` and `num_kv_heads` have no effect: the number of heads is read from the keys' shape.

        Errors: ConfigError unless heads are dimension 2 and the sequence is dimension 0 or 1
        """
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ConfigError(
                f"DistributedAttention(scatter_idx={scatter_idx}, gather_idx={gather_idx}): heads are "
                "dimension 2, and the sequence is 0 or 1, as batch_dim_idx says; leave both out"
            )
        self.local_attn, self.num_kv_heads = local_attention, num_kv_heads
        self._ranks = SequenceRanks.of(sequence_process_group)

    @property
    def spg(self) -> Any:
        """Return the process group of the ranks that share a sequence."""
        return self._ranks.group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return this rank's part of the sequence of the attention's result.

        Shapes: [sequence / ranks, batch, heads, head_dim], or with `batch_dim_idx` 0
                [batch, sequence / ranks, heads, head_dim]; the result may have heads * head_dim as one
                dimension.
                rotary_pos_emb: cosines and sines, [1, sequence, 1, rotated] each
        """
        if batch_dim_idx not in (0, 1):
            raise ConfigError(f"batch_dim_idx={batch_dim_idx}: is 0 or 1")
        sequence_dim = 1 - batch_dim_idx

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if rotary_pos_emb is not None:
                cos, sin = (one.permute(1, 0, 2, 3) for one in rotary_pos_emb)
                q, k = apply_rotary_pos_emb(q, cos, sin), apply_rotary_pos_emb(k, cos, sin)
            result: Tensor = self.local_attn(q, k, v, *args, **kwargs)
            return result

        return attend_over_ranks(
            attend,
            query,
            key,
            value,
            self._ranks,
            head_dim=2,
            sequence_dim=sequence_dim,
            result_dims=(2, sequence_dim),
        )


def apply_rotary_pos_emb(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Return queries or keys, rotated by their positions in the sequence.

    Source: DeepSpeed 0.19.8 sequence/layer.py, `apply_rotary_pos_emb`
    """
    turned, rest = t[..., : freqs_cos.shape[-1]], t[..., freqs_cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * freqs_cos + torch.cat((-second, first), dim=-1) * freqs_sin
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)

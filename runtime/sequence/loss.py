"""Losses of sequences that are divided over ranks: the mean over the labelled tokens of all ranks.

The mean of the ranks' means would weigh tokens differently if ranks have different numbers of labels.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError
from ..mesh.current import sums_over_sequence
from .exchange import SequenceRanks
from .parallel_state import current_ranks

IGNORED = -100


def mean_over_tokens(
    logits: Tensor, labels: Tensor, group: Any = None, *, ignore_index: int = IGNORED
) -> Tensor:
    """Return the mean cross entropy over the tokens with a label of all ranks that share the sequences: the
    same number on each rank. `labels` are already shifted, as the loader adapter returns them.

    The rule of the engine (`sequence.gradient` of the ds_config) turns the ranks' gradients into that of the
    mean. So with "mean" a rank's gradient is that of its part times the number of ranks, with "sum" that of
    its part.

    Shapes: logits [batch, this rank's positions, vocabulary], labels [batch, this rank's positions]
    Order:  a collective of the ranks that share the sequences
    """
    ranks = current_ranks() if group is None else SequenceRanks.of(group)
    flat = labels.reshape(-1)
    total = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), flat, ignore_index=ignore_index, reduction="sum"
    )
    count = (flat != ignore_index).sum()
    if ranks is None:
        return total / count.clamp(min=1)
    own = total / ranks.sum(count, "the number of labels").clamp(min=1)
    return _with_value(own if sums_over_sequence() else own * ranks.size, ranks.sum(own, "the loss"))


def vocab_sequence_parallel_cross_entropy(  # noqa: PLR0913  (DeepSpeed's signature)
    vocab_parallel_logits: Tensor,
    target: Tensor,
    sp_group: Any,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = IGNORED,
    reduction: str = "none",
    gather_sequence_loss: bool = True,
    backend: str = "torch",
) -> Tensor:
    """Return the cross entropy of each token of all ranks' parts of the sequence. Without
    `gather_sequence_loss`, return that of this rank's part, or the sum or mean over all ranks' tokens. A rank
    gets the gradient of its own part only, so the ds_config needs `sequence.gradient` "sum".

    Shapes: logits [this rank's positions, batch, vocabulary], target [this rank's positions, batch]; the
            result
            [all positions, batch]
    Order:  a collective
    Errors: ConfigError if the vocabulary is divided over ranks
    Source: DeepSpeed 0.19.8 sequence/cross_entropy.py
    """
    if gather_sequence_loss and reduction != "none":
        raise ConfigError(f"reduction={reduction!r}: gather_sequence_loss goes with 'none' only")
    if reduction not in ("none", "sum", "mean"):
        raise ConfigError(f"reduction={reduction!r} is not allowed; write 'none', 'sum' or 'mean'")
    if backend != "torch":
        raise ConfigError(f"backend={backend!r} is not available here; leave it out")
    if tp_group is not None and SequenceRanks.of(tp_group).size > 1:
        raise ConfigError(
            "tp_group is not supported here; leave it out, and divide the vocabulary over ranks with "
            "tensor_parallel.vocab_parallel_lm_head in the ds_config"
        )
    size = vocab_parallel_logits.shape[-1]
    if vocab_start_index not in (None, 0) or vocab_end_index not in (None, size):
        raise ConfigError(
            f"vocab_start_index={vocab_start_index}, vocab_end_index={vocab_end_index}: the logits have "
            f"{size}, and "
            "the whole vocabulary has to be there"
        )
    losses = F.cross_entropy(
        vocab_parallel_logits.reshape(-1, size).float(),
        target.reshape(-1),
        ignore_index=ignore_index,
        reduction="none",
    ).view(target.shape)
    ranks = SequenceRanks.of(sp_group) if sp_group is not None else None
    if gather_sequence_loss:
        if ranks is None:
            raise ConfigError("sp_group: is needed to put the ranks' losses together; give it")
        return _gathered(losses, ranks)
    if reduction == "none":
        return losses
    own = losses.sum()
    count = (target != ignore_index).sum()
    if ranks is not None:
        count = ranks.sum(count, "the number of labels")
    if reduction == "mean":
        own = own / count.clamp(min=1)
    return own if ranks is None else _with_value(own, ranks.sum(own, "the loss"))


def _gathered(losses: Tensor, ranks: SequenceRanks) -> Tensor:
    """Return all ranks' rows; only this rank's rows have a gradient."""
    rows = losses.shape[0]
    parts = ranks.gather(losses, "losses")
    whole = losses.new_zeros(rows * ranks.size, *losses.shape[1:])
    for index, part in enumerate(parts):
        whole[index * rows : (index + 1) * rows] = losses if index == ranks.index else part
    return whole


def _with_value(graph: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the gradient of `graph`."""
    return graph + (value - graph.detach())

"""Loss from parts of the logits: each rank has the logits of a different part of the vocabulary.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3; transformers 5.23 `ForCausalLMLoss`
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from ..log import logger
from ..mesh.cut import cut_evenly
from ..zero.parameters.uncompiled import uncompiled
from .exchange import TensorAxis
from .lower import Division
from .plan import TensorPlan
from .styles import Column, GatheredColumn

_IGNORED = -100


def check_head(module: nn.Module, plan: TensorPlan) -> None:
    """Check that a causal model's head will be divided over the ranks.

    Errors: ConfigError if it will not
    """
    head = _head_of(module)
    styles = (plan.modules.get(name) for name, one in module.named_modules() if one is head)
    if head is None or not any(style and style.forward is GatheredColumn for style in styles):
        raise ConfigError(
            "tensor_parallel.vocab_parallel_lm_head is for a Hugging Face causal model whose plan divides "
            "the head by columns; leave it out, or name the head in tensor_parallel.partition_config with "
            "gather_output"
        )


def use_parts_of_logits(module: nn.Module, axis: TensorAxis) -> None:
    """Let a Hugging Face causal model with a divided head compute its loss without joining the logits."""
    model: Any = module
    head = _head_of(module)
    was = head.forward
    loss = CausalLoss(axis, was.division, model.loss_function)
    head.forward = PartOfLogits(head, axis, was.name, was.division)
    head.forward.forward, head.forward.loss = was.forward, loss
    model.loss_function = loss


def _head_of(module: Any) -> Any:
    return module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None


class PartOfLogits(Column):
    """Style of a head whose output is not joined."""

    loss: CausalLoss

    @uncompiled
    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(input, *args, **kwargs)
        self.loss.note_logits(output.shape[-1], self.module.out_features)
        return output


class CausalLoss:
    """Stand-in for `whole`, transformers' ForCausalLMLoss, on the logits that this rank has."""

    def __init__(self, axis: TensorAxis, division: Division, whole: Any) -> None:
        self._axis, self._division, self._whole = axis, division, whole
        # number of logits here, and in all, whose loss is not computed yet; None: there are none
        self._logits: tuple[int, int] | None = None
        self._has_told = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the loss of a copy of the model, which is plain if it has whole parameters."""
        return self._whole if self._division.is_whole() else self

    def note_logits(self, here: int, size: int) -> None:
        """Note that the head has returned `here` of `size` logits."""
        if torch.is_grad_enabled():
            self._logits = here, size

    def end_forward(self) -> None:
        """Check that a forward that trains has computed this loss: another loss would take the logits for
        all.
        """
        if self._logits is not None and not self._has_told and dist.get_rank() == 0:
            logger.warning(
                "the model was given no labels, and its output has %d of %d logits, those of this rank "
                "(tensor_parallel.vocab_parallel_lm_head): a loss that the program computes from them takes "
                "them for all; give the model labels or shift_labels, or leave that key out. This is said "
                "once",
                *self._logits,
            )
            self._has_told = True
        self._logits = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean over the labels that count, or their sum over `num_items_in_batch`.

        Shapes: logits [..., this rank's part of the vocabulary], labels [...] int64
        """
        self._logits = None
        if shift_labels is None:
            if labels is None:
                raise ConfigError("the loss needs labels, or shift_labels")
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        rows = logits.float().reshape(-1, logits.shape[-1])
        total = cross_entropy(rows, targets, self._axis, vocab_size=vocab_size, ignored=ignore_index).sum()
        if num_items_in_batch is None:
            return total / (targets != ignore_index).sum()
        return total / num_items_in_batch


def cross_entropy(
    part: Tensor, targets: Tensor, axis: TensorAxis, *, vocab_size: int, ignored: int = _IGNORED
) -> Tensor:
    """Return the loss of each row, 0 where its target is `ignored`; the same on all ranks.

    Shapes: part [n, this rank's part of the vocabulary] float32, targets [n] int64, the result [n]
    """
    (piece,) = cut_evenly((vocab_size,), 0, index=axis.index, size=axis.size).pieces
    losses: Tensor = _CrossEntropy.apply(part, targets, axis, piece.offset, ignored)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, targets: Tensor, axis: TensorAxis, first: int, ignored: int
    ) -> Tensor:
        largest = axis.largest(part.amax(dim=-1), "the largest logits")
        exponentials = (part - largest.unsqueeze(-1)).exp()
        local = targets - first
        is_here = (local >= 0) & (local < part.shape[-1]) & (targets != ignored)
        index = local.masked_fill(~is_here, 0).unsqueeze(-1)
        own = part.gather(-1, index).squeeze(-1).masked_fill(~is_here, 0.0)
        sums, chosen = axis.sum(
            torch.stack((exponentials.sum(dim=-1), own)), "sums of exponentials, and the labels' logits"
        )
        ctx.save_for_backward(exponentials.div_(sums.unsqueeze(-1)), index, is_here, targets == ignored)
        losses: Tensor = sums.log() + largest - chosen
        return losses.masked_fill(targets == ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        probabilities, index, is_here, is_ignored = ctx.saved_tensors
        result = probabilities.clone()
        result.scatter_add_(-1, index, -is_here.to(result.dtype).unsqueeze(-1))
        return result.mul_(grad.masked_fill(is_ignored, 0.0).unsqueeze(-1)), None, None, None, None

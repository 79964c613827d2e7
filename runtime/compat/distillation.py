"""Losses of a student beside its teacher, on answers of the student: DeepSpeed's `runtime.rollout.opsd`.

Source: DeepSpeed 0.19.8 runtime/rollout/opsd.py; Agarwal and others 2023, On-Policy Distillation of Language
        Models, for the generalized Jensen-Shannon divergence
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .rollout import RolloutBatch


@dataclass(frozen=True)
class ResponseTokenBatch:
    """Tokens and what each is to be followed by: logits at place i predict `target_ids[:, i]`.

    Shapes: input_ids and attention_mask [answers, tokens]; target_ids and response_mask [answers, tokens - 1]
    """

    input_ids: Tensor
    attention_mask: Tensor
    target_ids: Tensor
    response_mask: Tensor

    @classmethod
    def from_rollout(cls, rollout: RolloutBatch) -> ResponseTokenBatch:
        """Return the targets of a rollout: tokens of the answers, without prompts and padding.

        Errors: ValueError for a `response_start_idx` that is none
        """
        ids, mask, starts = rollout.input_ids, rollout.attention_mask, rollout.response_start_idx
        if len({ids.device, mask.device, starts.device}) > 1:
            raise ValueError(
                f"input_ids, attention_mask and response_start_idx are on {ids.device}, {mask.device} and "
                f"{starts.device}; they must be on one device"
            )
        if (
            starts.dtype not in (torch.int32, torch.int64)
            or not ((starts >= 1) & (starts <= ids.shape[1])).all()
        ):
            raise ValueError(f"response_start_idx must have whole numbers from 1 to {ids.shape[1]}: {starts}")
        places = torch.arange(1, ids.shape[1], device=ids.device)
        is_answer = mask[:, 1:].bool() & (places >= starts[:, None])
        return cls(ids, mask, ids[:, 1:], is_answer)

    def select_causal_logits(self, logits: Tensor) -> Tensor:
        """Return the logits that predict `target_ids`.

        Shapes: logits [answers, tokens, vocabulary], the result without the last token
        Errors: ValueError for other shapes
        """
        if logits.dim() != 3 or logits.shape[:2] != self.input_ids.shape:
            raise ValueError(
                f"logits are {list(logits.shape)}; they must be {[*self.input_ids.shape]} with the vocabulary"
            )
        return logits[:, :-1]


@dataclass(frozen=True)
class JSDLossOutput:
    """A loss, the sum of which it is the mean, and the number of tokens. Shapes: []"""

    loss: Tensor
    loss_sum: Tensor
    valid_token_count: Tensor


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    response_mask: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_top_k: int | None = None,
    pointwise_clip: float | None = None,
) -> JSDLossOutput:
    """Return the generalized Jensen-Shannon divergence of the two distributions, over the answers' tokens.

    `beta` is the teacher's share of the mixture: 0 gives KL(teacher||student), and 1 KL(student||teacher).
    `teacher_top_k`: of the vocabulary only what the teacher
    finds likeliest counts. `pointwise_clip`: no word of the vocabulary adds more than this.
    Shapes: logits [answers, tokens, vocabulary], response_mask [answers, tokens]
    Errors: ValueError for other shapes and numbers
    """
    _check(student_logits, teacher_logits, response_mask)
    vocabulary = student_logits.shape[-1]
    if not 0 <= beta <= 1 or temperature <= 0:
        raise ValueError(f"beta={beta} must be from 0 to 1, and temperature={temperature} above 0")
    if teacher_top_k is not None and not 0 < teacher_top_k <= vocabulary:
        raise ValueError(f"teacher_top_k={teacher_top_k} must be from 1 to the vocabulary's {vocabulary}")
    if pointwise_clip is not None and pointwise_clip < 0:
        raise ValueError(f"pointwise_clip={pointwise_clip} must not be negative")
    if teacher_top_k is not None:
        likeliest = teacher_logits.topk(teacher_top_k, dim=-1).indices
        student_logits, teacher_logits = (
            one.gather(-1, likeliest) for one in (student_logits, teacher_logits)
        )
    student = (student_logits / temperature).log_softmax(-1)
    teacher = (teacher_logits / temperature).log_softmax(-1)
    if beta in (0, 1):
        of, beside = (teacher, student) if beta == 0 else (student, teacher)
        divergence = of.exp() * (of - beside)
    else:
        mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
        divergence = beta * teacher.exp() * (teacher - mixture)
        divergence = divergence + (1 - beta) * student.exp() * (student - mixture)
    if pointwise_clip is not None:
        divergence = divergence.clamp(max=pointwise_clip)
    total = (divergence.sum(-1) * response_mask.to(divergence.dtype)).sum()
    count = response_mask.to(torch.int64).sum()
    return JSDLossOutput(total / count.clamp_min(1), total, count)


def _check(student: Tensor, teacher: Tensor, mask: Tensor) -> None:
    if student.shape != teacher.shape or student.dim() != 3 or mask.shape != student.shape[:2]:
        raise ValueError(
            f"logits are {list(student.shape)} of the student and {list(teacher.shape)} of the teacher, and "
            f"the mask is {list(mask.shape)}: [answers, tokens, vocabulary] and [answers, tokens] are wanted"
        )

"""deepspeed.runtime.rollout: answers that ranks generate, and a student that learns from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import dslaunch
from dslaunch.runtime.compat.distillation import ResponseTokenBatch, generalized_jsd_loss
from dslaunch.runtime.compat.rollout import (
    HybridEngineRolloutConfig,
    RolloutBatch,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
)
from dslaunch.runtime.errors import ConfigError
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks

END, PADDING = 2, 0
GREEDY = SamplingConfig(max_new_tokens=12, temperature=0.0)


class Speaker(torch.nn.Module):
    """Says `length` times 5, and then the end, by the generate() of transformers' signature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(8, 16)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.head = torch.nn.Linear(16, 8)
        self.length = 3

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).cumsum(1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        made: Tensor = self.head(x)
        return made

    def generate(self, ids: Tensor, *, max_new_tokens: int, eos_token_id: int, **options: Any) -> Tensor:
        assert options["do_sample"] is False
        for place in range(min(max_new_tokens, self.length + 1)):
            self(ids)
            said = 5 if place < self.length else eos_token_id
            ids = torch.cat([ids, ids.new_full((len(ids), 1), said)], dim=1)
        return ids


def _learns(rank: int, stage: int) -> None:
    config = make_config(stage=stage, reduce_bucket_size=50)
    student = dslaunch.initialize(model=Speaker(), config=config)[0]
    without = make_config(stage=3 if stage == 3 else 0, reduce_bucket_size=50)
    del without["optimizer"]
    frozen = Speaker().requires_grad_(False)
    teacher = dslaunch.initialize(model=frozen, config=without)[0]
    plain, plain_teacher = Speaker(), Speaker()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    tokenizer = SimpleNamespace(eos_token_id=END, pad_token_id=PADDING)
    rollout = build_rollout(RolloutConfig(), student, tokenizer)
    for _ in range(2):
        losses: list[Tensor] = []
        for place in range(2):  # the ranks, as one process sees them
            ids = torch.tensor([[PADDING, 3, 4 + place]])
            student.module.length = 2 + 4 * place
            request = RolloutRequest(ids, (ids != PADDING).long())
            if place == rank:
                made = rollout.generate(request, GREEDY)
                assert made.input_ids.tolist() == [[0, 3, 4 + place, *[5] * (2 + 4 * place), END]]
                assert made.attention_mask.tolist() == [[0, 1, 1, *[1] * (3 + 4 * place)]]
                batch = ResponseTokenBatch.from_rollout(made)
                with torch.no_grad():
                    taught = batch.select_causal_logits(teacher(batch.input_ids))
                ours = generalized_jsd_loss(
                    batch.select_causal_logits(student(batch.input_ids)), taught + 1, batch.response_mask
                ).loss
            whole = torch.tensor([[0, 3, 4 + place, *[5] * (2 + 4 * place), END]])
            mask = torch.arange(1, whole.shape[1])[None] >= 3
            wanted = plain_teacher(whole)[:, :-1].detach() + 1
            losses.append(generalized_jsd_loss(plain(whole)[:, :-1], wanted, mask).loss)
        torch.testing.assert_close(ours, losses[rank])
        student.backward(ours)
        student.step()
        optimizer.zero_grad()
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    with dslaunch.zero.GatheredParameters(student.module.parameters()):
        for own, wanted in zip(student.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_whose_answers_end_apart_learn_as_one_process(ranks: Ranks, stage: int) -> None:
    """What deadlocks in DeepSpeed#8262: one rank is in the teacher's forward while the other generates."""
    ranks(_learns, stage, world_size=2)


def test_the_divergence_is_that_of_its_definition() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 7, requires_grad=True), torch.randn(2, 3, 7)
    mask = torch.tensor([[True, True, False], [False, True, True]])
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    for beta in (0.0, 0.3, 1.0):
        mixture = beta * p + (1 - beta) * q
        both = [(beta, p, mixture), (1 - beta, q, mixture)]
        parts = {0.0: [(1.0, p, q)], 1.0: [(1.0, q, p)]}.get(beta, both)
        wanted = sum(share * functional.kl_div(b.log(), a, reduction="none") for share, a, b in parts)
        assert isinstance(wanted, Tensor)
        made = generalized_jsd_loss(student, teacher, mask, beta=beta, temperature=2.0)
        torch.testing.assert_close(made.loss_sum, (wanted.sum(-1) * mask).sum())
        torch.testing.assert_close(made.loss, made.loss_sum / 4)
        assert made.valid_token_count == 4
    few = generalized_jsd_loss(student, teacher, mask, teacher_top_k=2, pointwise_clip=0.01)
    assert few.loss <= 2 * 0.01
    (gradient,) = torch.autograd.grad(few.loss_sum, student)
    assert not gradient[~mask].any()


def test_mistakes_are_named() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"prompt_attention_mask \[2, 2\] does not match prompt_ids \[2, 3\]"
    ):
        RolloutRequest(ids, ids[:, :2])
    with pytest.raises(ValueError, match="1-D of length 2, one for each answer"):
        RolloutBatch(ids, ids, ids[0])
    with pytest.raises(ValueError, match="from 1 to 3"):
        ResponseTokenBatch.from_rollout(RolloutBatch(ids, ids, torch.tensor([0, 1])))
    with pytest.raises(ValueError, match="Unknown rollout engine 'vllm'; there is"):
        build_rollout(RolloutConfig(engine="vllm"))
    engine: Any = object()
    with pytest.raises(ConfigError, match="use_shared_prefill=True is not available here"):
        build_rollout(SimpleNamespace(engine="hybrid_engine", use_shared_prefill=True), engine, object())
    rollout = build_rollout(
        SimpleNamespace(engine="hybrid_engine", **vars(HybridEngineRolloutConfig())), engine, object()
    )
    with pytest.raises(ConfigError, match="continuous_batch_size=4 is not available"):
        rollout.generate(RolloutRequest(ids, ids), SamplingConfig(max_new_tokens=1, continuous_batch_size=4))

"""Experts of Hugging Face models over ranks are trained as one process trains them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch.runtime.errors import ConfigError
from dslaunch.utils import safe_get_full_fp32_param
from tests.exhaustive import few
from tests.runtime.experts.models import start, train, train_plain
from tests.runtime.ranks import Ranks

NEAR = 1e-6  # relative: sums of float32 in another order
VOCAB = 48
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12,
    },
}


def make(kind: str, *, seed: int = 0) -> Any:
    """A causal model of transformers, which the workers import late."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind]})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def loss_of(model: Any, x: Tensor) -> Tensor:
    """Of tokens that the numbers of a batch are made."""
    tokens = (x.float() * 1e3).long() % VOCAB
    result: Tensor = model(input_ids=tokens, labels=tokens).loss
    return result


def loss_of_few(model: Any, x: Tensor) -> Tensor:
    """All tokens are the same, so most experts get none."""
    tokens = torch.full((len(x), 4), 3)
    result: Tensor = model(input_ids=tokens, labels=tokens).loss
    return result


LOSSES = {"many": loss_of, "few": loss_of_few}


def _trained(
    rank: int, kind: str, size: int, stage: int, changes: dict[str, Any], loss: str, folder: str
) -> Any:
    model = make(kind, seed=rank)  # and gets rank 0's values
    section = {"enabled": True, "autoep_size": size}
    engine = start(model, stage, expert_parallel=section, **changes)
    held = sum(
        param.ds_numel if hasattr(param, "ds_numel") else param.numel() for param in model.parameters()
    )
    numbers = train(engine, LOSSES[loss])
    values = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    if folder:
        engine.save_checkpoint(folder, tag="here")
        engine.save_16bit_model(folder, "weights.safetensors")
    if stage < 3 and size > 1:
        with pytest.raises(ConfigError, match=r"this rank's experts of 'model.layers.0.mlp.experts'"):
            model.state_dict()
    engine.destroy()
    return numbers, values, held


CASES = [
    *((kind, size, stage, {}, "many") for kind in KINDS for size in (2, 4) for stage in (0, 1, 2, 3)),
    *(
        ("Mixtral", 2, stage, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "many")
        for stage in (1, 2, 3)
    ),
    *(("Mixtral", 4, stage, {}, "few") for stage in (0, 3)),
]


def _is_kept(kind: str, size: int, stage: int, changes: dict[str, Any], loss: str) -> bool:
    if changes:
        return False
    if loss == "few":
        return stage == 3
    return (kind, size, stage) in (("Mixtral", 2, 3), ("Qwen3Moe", 2, 1), ("Qwen2Moe", 4, 2))


@pytest.mark.parametrize(("kind", "size", "stage", "changes", "loss"), few(CASES, _is_kept))
def test_experts_of_hugging_face_are_trained_as_in_one_process(
    ranks: Ranks, kind: str, size: int, stage: int, changes: dict[str, Any], loss: str
) -> None:
    plain = make(kind)
    expected = train_plain(plain, LOSSES[loss])
    for numbers, values, _ in ranks(_trained, kind, size, stage, changes, loss, "", world_size=4):
        for (own, norm), (other, other_norm) in zip(numbers, expected, strict=True):
            assert own == pytest.approx(other, rel=NEAR)
            assert norm == pytest.approx(other_norm, rel=NEAR)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(values[name], param.detach(), rtol=2e-6, atol=2e-6, msg=name)

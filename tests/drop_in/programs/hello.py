"""A program as HelloDeepSpeed is: a masked language model, no init_distributed(),
checkpoints with a client state.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
from transformers import RobertaConfig, RobertaForMaskedLM


def batch_at(step: int, device: torch.device) -> dict[str, torch.Tensor]:
    tokens = (torch.arange(12).view(1, -1) * torch.arange(1, 5).view(-1, 1) + step) % 40 + 4
    masked = tokens.clone()
    masked[:, step % 12] = 3
    return {"input_ids": masked.to(device), "labels": tokens.to(device)}


def train(checkpoint_dir: Path, stage: int, num_iterations: int, *, is_resumed: bool) -> None:
    torch.manual_seed(0)
    model = RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=48,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
            pad_token_id=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    ds_config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 50,
        },
    }
    if stage > 0:
        ds_config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    start_step = 1
    if is_resumed:
        _, client_state = model.load_checkpoint(load_dir=checkpoint_dir)
        start_step = client_state["checkpoint_step"] + 1
    model.train()
    losses = []
    for step in range(start_step, num_iterations + 1):
        loss = model(**batch_at(step, model.device)).loss
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        if step == num_iterations // 2:
            model.save_checkpoint(save_dir=checkpoint_dir, client_state={"checkpoint_step": step})
    print("RESULT", model.global_rank, *losses, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--num_iterations", type=int, default=8)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    given = parser.parse_args()
    train(given.folder, given.stage, given.num_iterations, is_resumed=given.resume)

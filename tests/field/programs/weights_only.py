"""Load weights without the optimizer in bfloat16, and take a step of almost nothing: do they stay?"""

import json

import deepspeed
import torch
from torch import nn


def make_engine(seed: int):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-8, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 1},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine) -> None:
    engine.backward(engine(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().mean())
    engine.step()


def first_weights(engine) -> torch.Tensor:
    return engine.module[0].weight.detach().float().clone()


pretrained = make_engine(seed=0)
step(pretrained)
pretrained.save_checkpoint("checkpoints")
wanted = first_weights(pretrained)
engine = make_engine(seed=1)
engine.load_checkpoint("checkpoints", load_module_only=True)
step(engine)
off = (first_weights(engine) - wanted).abs().max().item()
print(json.dumps({"rank": engine.global_rank, "off": off, "allowed": 1e-6}), flush=True)

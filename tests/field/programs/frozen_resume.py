"""Resume at ZeRO-3 a model with frozen layers: frozen_resume.py save, then frozen_resume.py load."""

import json
import sys

import deepspeed
import torch
from torch import nn

IS_LOADING = sys.argv[-1] == "load"


def weights(model) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


torch.manual_seed(1 if IS_LOADING else 0)  # a new process begins with other weights
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
model[0].requires_grad_(False)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=[one for one in model.parameters() if one.requires_grad], config=config
)
if IS_LOADING:
    engine.load_checkpoint("checkpoints")
    found, saved = weights(engine.module), torch.load(f"weights{engine.global_rank}.pt")
    same = {name: torch.equal(found[name], saved[name]) for name in saved}
    print(
        json.dumps({"rank": engine.global_rank, "lost": [name for name in same if not same[name]]}),
        flush=True,
    )
else:
    inputs = torch.randn(4, 8)
    engine.backward(engine(inputs).square().mean())
    engine.step()
    torch.save(weights(engine.module), f"weights{engine.global_rank}.pt")
    engine.save_checkpoint("checkpoints")
    print(json.dumps({"rank": engine.global_rank}), flush=True)

"""Save a checkpoint on rank 0 alone, as is usual with DDP, and go on training."""

import json

import deepspeed
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 8)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(4):
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
    if step == 1 and engine.global_rank == 0:
        engine.save_checkpoint("checkpoints")
print(json.dumps({"rank": engine.global_rank, "steps": engine.global_steps}), flush=True)

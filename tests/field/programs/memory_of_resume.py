"""Measure the memory that each rank needs to resume at ZeRO-2: memory_of_resume.py save, then load."""

import json
import sys

import deepspeed
import torch
from library.memory import peak_while
from torch import nn

IS_LOADING = sys.argv[-1] == "load"
MB = 2**20

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
weights_mb = sum(one.numel() for one in model.parameters()) * 4 / MB
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.backward(engine(torch.ones(1, 1024)).square().mean())
engine.step()
if IS_LOADING:
    grown = peak_while(lambda: engine.load_checkpoint("checkpoints"))
    share_mb = weights_mb * 3 / 2  # masters and both states of Adam, of two ranks
    print(
        json.dumps({"rank": engine.global_rank, "grown": grown, "allowed": weights_mb + share_mb}), flush=True
    )
else:
    engine.save_checkpoint("checkpoints")
    print(json.dumps({"rank": engine.global_rank}), flush=True)

"""Measure the memory that each rank needs to read all weights of a model at ZeRO-3, one after the other."""

import json

import deepspeed
import torch
from library.memory import peak_while
from torch import nn

BLOCKS, WIDTH = 12, 1024
MB = 2**20


def read_all() -> None:
    for block in engine.module:
        for parameter in block.parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                parameter.data.sum()


torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
)
block_mb = 2 * WIDTH * (WIDTH + 1) * 4 / MB
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 2 * WIDTH * (WIDTH + 1),
    },
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(2):
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()
grown = peak_while(read_all)
# The model has 100 MB: a block, what it is gathered through, and what a process needs to look at itself.
print(json.dumps({"rank": engine.global_rank, "grown": grown, "allowed": 4 * block_mb}), flush=True)

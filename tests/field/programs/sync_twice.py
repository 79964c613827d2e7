"""Read all weights at ZeRO-3 with zero_hpz_partition_size before and after steps whose learning rate is 0."""

import hashlib
import json

import deepspeed
import torch
from torch import nn

STEPS = 3


def digest() -> list[int]:
    found = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            values = parameter.data.float().numpy().tobytes()
        found.append(int.from_bytes(hashlib.sha256(values).digest()[:6]))
    return found


torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}},
    "zero_optimization": {
        "stage": 3,
        "zero_hpz_partition_size": 2,
        "stage3_param_persistence_threshold": 0,
    },
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
first = digest()
later = []
for step in range(STEPS):
    of_rank = torch.Generator().manual_seed(10 * step + engine.global_rank)
    inputs = torch.randn(4, 8, generator=of_rank).bfloat16()
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
    later += digest()
print(json.dumps({"rank": engine.global_rank, "later": later, "first": STEPS * first}), flush=True)

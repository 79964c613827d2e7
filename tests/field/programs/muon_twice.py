"""Train the same steps with Muon in two ways, and compare the weights: muon_twice.py WAY.

WAY is `offload` (states in host memory, or not), `accumulation` (four micro batches, or one), or `ranks`
(both have the same weights).
"""

import json
import sys

import deepspeed
import torch
from torch import nn

WAY = sys.argv[-1]
STEPS, SAMPLES = 3, 8


def weights(model) -> list[float]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [number for one in model.parameters() for number in one.detach().float().flatten().tolist()]


def train(zero: dict, micro: int = 1) -> list[float]:
    """Return all weights after the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24, bias=False), nn.Tanh(), nn.Linear(24, 8, bias=False))
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // micro,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.0}},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(STEPS):
        random = torch.Generator().manual_seed(10 * step + engine.global_rank)
        for inputs in torch.randn(SAMPLES, 16, generator=random).chunk(micro):
            engine.backward((engine(inputs) - inputs[:, :8].cumsum(1)).square().mean())
            engine.step()
    return weights(engine.module)


deepspeed.init_distributed()
if WAY == "offload":
    wanted = train({"stage": 2, "reduce_scatter": False})
    found = train({"stage": 2, "reduce_scatter": False, "offload_optimizer": {"device": "cpu"}})
elif WAY == "accumulation":
    wanted = train({"stage": 3, "reduce_scatter": False})
    found = train({"stage": 3, "reduce_scatter": False}, micro=4)
else:
    found = train({"stage": 2})
    other = torch.tensor(found)
    deepspeed.comm.broadcast(other, src=0)
    wanted = other.tolist()
print(json.dumps({"rank": deepspeed.comm.get_rank(), "weights": found, "wanted": wanted}), flush=True)

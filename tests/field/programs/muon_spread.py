"""Take one step of Muon, and look at each matrix's update: muon_spread.py STAGE [init].

Muon makes the update of a matrix orthogonal: its singular values are about equal, unlike a gradient's.
"""

import json
import sys
from contextlib import nullcontext

import deepspeed
import torch
from torch import nn

IS_INIT = sys.argv[-1] == "init"
STAGE = int(sys.argv[-2] if IS_INIT else sys.argv[-1])
MOST = 4.0  # five Newton-Schulz steps leave singular values between 0.5 and 1.5 of each other


def weights(model) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [one.detach().float().clone() for one in model.parameters()]


def loss_of(model, rank: int) -> torch.Tensor:
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(rank))
    return (model(inputs) - inputs[:, :8].cumsum(1)).square().mean()


config = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "Muon", "params": {"lr": 0.02, "weight_decay": 0.0}},
    "zero_optimization": {"stage": STAGE, "reduce_scatter": False},
}
deepspeed.init_distributed()
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=config) if IS_INIT else nullcontext():
    model = nn.Sequential(nn.Linear(16, 24, bias=False), nn.Tanh(), nn.Linear(24, 8, bias=False))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
before = weights(engine.module)
engine.backward(loss_of(engine, engine.global_rank))
engine.step()
spreads = []
for old, new in zip(before, weights(engine.module), strict=True):
    values = torch.linalg.svdvals(old - new)
    spreads.append((values.max() / values.min().clamp(min=1e-12)).item())
facts = {"spreads": spreads, "is_orthogonal": max(spreads) < MOST}
print(json.dumps({"rank": engine.global_rank, **facts}), flush=True)

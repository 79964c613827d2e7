"""Train the same steps with Muon in two ways, and compare the weights: muon_twice.py WAY.

WAY is `offload` (states in host memory, or not), `accumulation` (four micro batches, or one), or `scattered`
(gradients that come in parts to each rank, or whole).
"""

import json
import sys

import deepspeed
import torch
from torch import nn

WAY = sys.argv[-1]
STEPS, SAMPLES = 3, 8


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24, bias=False), nn.Tanh(), nn.Linear(24, 8, bias=False))


def initial() -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in make_model().parameters()])


def weights(model) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return torch.cat([one.detach().float().flatten() for one in model.parameters()])


def train(zero: dict, micro: int = 1) -> torch.Tensor:
    """Return all weights after the steps."""
    model = make_model()
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
    wanted = train({"stage": 2, "reduce_scatter": False})
    found = train({"stage": 2})
off = ((found - wanted).abs().max() / (wanted - initial()).abs().max()).item()
print(json.dumps({"rank": deepspeed.comm.get_rank(), "off": off, "allowed": 0.05}), flush=True)

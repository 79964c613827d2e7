"""Ask at a stage for the norm of each gradient, and compute it in plain torch: grad_norm.py STAGE."""

import json
import sys

import deepspeed
import torch
from torch import nn

STEPS, RANKS, MICRO = 4, 2, 2
STAGE = int(sys.argv[-1])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def loss_of(model, step: int, rank: int) -> torch.Tensor:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def plain() -> list[float]:
    """Return the norm of each step's gradient."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    seen = []
    for step in range(STEPS):
        batches = [(MICRO * step + micro, rank) for micro in range(MICRO) for rank in range(RANKS)]
        torch.stack([loss_of(model, *batch) for batch in batches]).mean().backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
    return seen


model = make_model()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": MICRO,
    "gradient_clipping": 1e9,  # so that the norm is computed
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
    "zero_optimization": {"stage": STAGE},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
norms = []
for step in range(STEPS):
    for micro in range(MICRO):
        loss = loss_of(engine, MICRO * step + micro, engine.global_rank)
        engine.backward(loss)
        engine.step()
    norm = engine.get_global_grad_norm()
    norms.append(norm if norm is None else float(norm))
print(json.dumps({"rank": engine.global_rank, "norms": norms, "plain": plain()}), flush=True)

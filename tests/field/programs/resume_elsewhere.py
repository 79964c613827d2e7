"""Save with two ranks and go on with one, at a stage: resume_elsewhere.py STAGE save, then STAGE load."""

import json
import sys

import deepspeed
import torch
from torch import nn

STEPS, RANKS = 6, 2
HALF = STEPS // 2
STAGE = int(sys.argv[-2])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def loss_of(model, step: int, rank: int) -> torch.Tensor:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def plain() -> list[list[float]]:
    """Return for each step the loss of each rank."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    seen = []
    for step in range(STEPS):
        losses = torch.stack([loss_of(model, step, rank) for rank in range(RANKS)])
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(losses.tolist())
    return seen


model = make_model()
config = {
    "train_batch_size": 8,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
    "zero_optimization": {"stage": STAGE},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
is_loading = sys.argv[-1] == "load"
if is_loading:
    engine.load_checkpoint("checkpoints")
losses = []
steps = range(HALF, STEPS) if is_loading else range(HALF)
for step in steps:
    mine = range(RANKS) if is_loading else [engine.global_rank]
    loss = torch.stack([loss_of(engine, step, batch) for batch in mine]).mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if not is_loading:
    engine.save_checkpoint("checkpoints")
wanted = [sum(plain()[step][batch] for batch in mine) / len(mine) for step in steps]
print(json.dumps({"rank": engine.global_rank, "losses": losses, "plain": wanted}), flush=True)

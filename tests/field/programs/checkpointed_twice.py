"""Run layers twice in a forward at ZeRO-2 with activation checkpointing: checkpointed_twice.py WAY.

WAY is `siamese` (one model, two inputs) or `recursive` (one layer, its own output).
"""

import json
import sys

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS, RANKS = 4, 2
WAY = sys.argv[-1]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 16)
        self.layer = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.after = nn.Linear(16, 1)

    def forward(self, inputs):
        hidden = self.before(inputs)
        first = checkpoint(self.layer, hidden, use_reentrant=True)
        second = checkpoint(self.layer, -hidden if WAY == "siamese" else first, use_reentrant=True)
        return self.after(first + second)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Twice()


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
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
losses = []
for step in range(STEPS):
    loss = loss_of(engine, step, engine.global_rank)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
wanted = [step[engine.global_rank] for step in plain()]
print(json.dumps({"rank": engine.global_rank, "losses": losses, "plain": wanted}), flush=True)

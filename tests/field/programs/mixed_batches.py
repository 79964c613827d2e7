"""Train a model whose vision tower runs on one rank and not on the other: mixed_batches.py STAGE."""

import json
import sys

import deepspeed
import torch
from torch import nn

STEPS, RANKS = 4, 2
STAGE = int(sys.argv[-1])


class Mixed(nn.Module):
    """A language model with a vision tower, which runs where there is a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(8, 16)
        self.tower = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 1)

    def forward(self, text, picture):
        hidden = self.text(text)
        if picture is not None:
            hidden = hidden + self.tower(picture)
        return self.head(torch.tanh(hidden))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


def loss_of(model, step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 * step + rank)
    text, picture = torch.randn(4, 8, generator=random), torch.randn(4, 12, generator=random)
    has_picture = (step + rank) % 2 == 0  # one rank has pictures, the other has text alone
    return (model(text, picture if has_picture else None) - text.sum(1, keepdim=True)).square().mean()


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
    "zero_optimization": {"stage": STAGE, "stage3_param_persistence_threshold": 0},
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

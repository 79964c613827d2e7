"""Train a mixture of experts at ZeRO-3 where tokens choose other experts on each rank."""

import json

import deepspeed
import torch
from torch import nn

STEPS, RANKS = 4, 2


class Experts(nn.Module):
    """Each token goes to the expert that its first number chooses; an expert without tokens does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)
        )
        self.head = nn.Linear(8, 1)

    def forward(self, inputs):
        chosen = inputs[:, 0].clamp(-1.9, 1.9).add(2).long()
        hidden = torch.zeros_like(inputs)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()
            if len(mine):
                hidden = hidden.index_add(0, mine, expert(inputs[mine]))
        return self.head(inputs + hidden)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Experts()


def loss_of(model, step: int, rank: int) -> torch.Tensor:
    inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def plain() -> list[list[float]]:
    """Return for each step the loss of each rank."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    seen = []
    for step in range(STEPS):
        for parameter in model.parameters():  # an expert without tokens has a gradient of zeros
            parameter.grad = torch.zeros_like(parameter)
        losses = torch.stack([loss_of(model, step, rank) for rank in range(RANKS)])
        losses.mean().backward()
        optimizer.step()
        seen.append(losses.tolist())
    return seen


model = make_model()
config = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
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

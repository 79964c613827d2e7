"""Train a model whose last parameter has no elements at stages 1 and 2, and in plain torch."""

import json

import deepspeed
import torch
from torch import nn

STEPS, RANKS, MICRO = 4, 2, 1


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model.register_parameter("adapter", nn.Parameter(torch.empty(0, 32)))
    return model


def samples(step: int, rank: int) -> torch.Tensor:
    return torch.randn(MICRO, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def plain() -> list[list[float]]:
    """Return for each step the loss of each rank."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    seen = []
    for step in range(STEPS):
        losses = torch.stack([loss_of(model, samples(step, rank)) for rank in range(RANKS)])
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(losses.tolist())
    return seen


def train(stage: int) -> list[float]:
    """Return the losses of this rank."""
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(STEPS):
        micro_losses = []
        for sample in samples(step, deepspeed.comm.get_rank()).split(1):
            loss = loss_of(engine, sample)
            engine.backward(loss)
            engine.step()
            micro_losses.append(loss.item())
        losses.append(sum(micro_losses) / MICRO)
    return losses


deepspeed.init_distributed()
losses = [train(stage) for stage in (1, 2)]
rank = deepspeed.comm.get_rank()
wanted = [[step[rank] for step in plain()]] * 2
print(json.dumps({"rank": rank, "losses": losses, "plain": wanted}), flush=True)

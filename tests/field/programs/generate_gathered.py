"""Gather the weights at ZeRO-3 to generate with them, ranks at their own pace, in turn with training."""

import json

import deepspeed
import torch
from torch import nn

STEPS = 4


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        return self.head(hidden + self.block(hidden))


def generate(model, length: int, first: int) -> torch.Tensor:
    tokens = torch.tensor([[first]])
    while tokens.shape[1] < length:
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


def loss_of(model, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


torch.manual_seed(0)
model, plain = Tiny(), Tiny()
plain.load_state_dict(model.state_dict())
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
losses, wanted = [], []
for step in range(STEPS):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        state = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    sampler = Tiny()
    sampler.load_state_dict(state)
    tokens = generate(sampler, 4 + step + 5 * engine.global_rank, 1 + engine.global_rank)
    loss = loss_of(engine, tokens)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    both = torch.stack([loss_of(plain, generate(plain, 4 + step + 5 * rank, 1 + rank)) for rank in range(2)])
    both.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    wanted.append(both[engine.global_rank].item())
print(json.dumps({"rank": engine.global_rank, "losses": losses, "plain": wanted}), flush=True)

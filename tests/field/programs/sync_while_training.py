"""Steps at ZeRO-3 with forwards that have no backward, generation, saves, a forward that fails, and weights
that are read one at a time; and the same steps in plain torch.
"""

import contextlib
import json

import deepspeed
import torch
from torch import nn

STEPS, SAVE_EVERY, RANKS = 60, 20, 2


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, fails=False):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
            if fails:
                raise ValueError("a reward that fails")
        return self.head(hidden)


def answer_of(model, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(4):
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
losses, wanted, synced, whole = [], [], [], []
for step in range(STEPS):
    prompts = [torch.tensor([[1 + (step + rank) % 15]]) for rank in range(RANKS)]
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        tokens = answer_of(engine.module, prompts[engine.global_rank])
    with torch.no_grad():
        engine(tokens)  # probabilities before the step
        with contextlib.suppress(ValueError):
            engine(tokens, fails=True)
    loss = loss_of(engine, tokens)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    if step % SAVE_EVERY == 0:
        engine.save_checkpoint("checkpoints")
    total = 0.0
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            total += parameter.data.double().abs().sum().item()
    synced.append(total)
    both = torch.stack([loss_of(plain, answer_of(plain, prompt)) for prompt in prompts])
    both.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    wanted.append(both[engine.global_rank].item())
    whole.append(sum(one.data.double().abs().sum().item() for one in plain.parameters()))
facts = {"losses": losses, "plain": wanted, "synced": synced, "whole": whole}
print(json.dumps({"rank": engine.global_rank, **facts}), flush=True)

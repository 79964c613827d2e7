"""Small models with awkward shapes, and their training with and without the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dslaunch

GLOBAL_BATCH = 12  # divides by 1, 2, 3 and 4 ranks
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}


class Uneven(nn.Module):
    """Widths 7, 15, 17: no shard ends where a parameter does. Three units of one block, and a root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 15)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(15, 17), nn.Tanh(), nn.Linear(17, 15)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(15)
        self.last = nn.Linear(15, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.last(self.norm(x))
        return result


class Blocks(nn.Module):
    """Linear layers of one size, each of which adds to what it takes; each is a unit, and the root has no
    parameters of its own.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Tied(nn.Module):
    """Tied ends, a frozen layer, a persistent and another buffer, an integer parameter: all that a
    state_dict can hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 15, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(15, 15) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(7, 15, bias=False)
        self.head.weight = self.embed.weight
        self.count = nn.Parameter(torch.tensor([3]), requires_grad=False)
        self.blocks[2].register_buffer("seen", torch.ones(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x @ self.head.weight


class Writer(nn.Module):
    """Layers over an embedding; the next token is the likeliest."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 15)
        self.blocks = nn.ModuleList(nn.Linear(15, 15) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(15, 11)

    def forward(self, tokens: Tensor, order: Sequence[int] = (0, 1, 2)) -> Tensor:
        x = self.embed(tokens).cumsum(1)
        for place in order:
            x = x + torch.tanh(self.dropout(self.blocks[place](x)))
        made: Tensor = self.head(x)
        return made

    def generate(self, tokens: Tensor, num: int) -> Tensor:
        for _ in range(num):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def make_model(kind: Callable[[], nn.Module] = Uneven, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def make_config(**changes: Any) -> dict[str, Any]:
    """A ds_config for fp32 and AdamW, small buckets, with `changes` at the top level;
    stage= goes where it belongs.
    """
    stage = changes.pop("stage", 0)
    bucket = changes.pop("reduce_bucket_size", 600)
    return {
        "train_batch_size": GLOBAL_BATCH,
        "optimizer": ADAMW,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": bucket,
        },
        **changes,
    }


def batch(step: int, *, size: int = GLOBAL_BATCH, width: int = 7) -> Tensor:
    """The global batch of one step, the same on every rank."""
    return torch.randn(size, width, generator=torch.Generator().manual_seed(1000 + step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over samples, so equal parts of a batch have the mean loss of the whole."""
    result: Tensor = model(x).float().pow(2).mean()
    return result


def train_engine(
    engine: dslaunch.Engine,
    *,
    steps: int,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
    size: int = GLOBAL_BATCH,
) -> list[float]:
    """Train on this rank's part of each global batch, micro batch by micro batch; return the losses."""
    losses = []
    gas = engine.gradient_accumulation_steps()
    for step in range(first, first + steps):
        for micro in batch(step, size=size).chunk(gas):
            own = micro.chunk(engine.world_size)[engine.global_rank].to(dtype)
            loss = loss_of(engine, own)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def train_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    clipping: float = 0.0,
    size: int = GLOBAL_BATCH,
) -> list[float]:
    """Train on whole batches with plain PyTorch; return the gradient norms."""
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(step, size=size)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clipping or float("inf"))))
        optimizer.step()
    return norms


def snapshot(named: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies by name; of sharded parameters, the whole ones: a collective."""
    items = dict(named)
    with dslaunch.zero.GatheredParameters(items.values()):
        return {name: tensor.detach().clone() for name, tensor in items.items()}


def trained_plain(make: MakeOptimizer, *, steps: int = 10) -> dict[str, Tensor]:
    """The parameters that plain training comes to with the optimizer that `make` gives."""
    model = make_model()
    train_plain(model, make(model), steps=steps)
    return snapshot(model.named_parameters())


def trained_at(
    stages: Iterable[int], make: MakeOptimizer, *, steps: int = 10, steps_before: int = 0
) -> list[dict[str, Tensor]]:
    """What the same training comes to with an engine, for each stage;
    the engine is made after so many plain steps.
    """
    results = []
    for stage in stages:
        model = make_model()
        optimizer = make(model)
        train_plain(model, optimizer, steps=steps_before)
        engine, *_ = dslaunch.initialize(model=model, optimizer=optimizer, config=make_config(stage=stage))
        assert not optimizer.state  # whole tensors, which are of no use any more
        train_engine(engine, steps=steps - steps_before, first=steps_before)
        results.append(snapshot(model.named_parameters()))
    return results


def worst_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The greatest absolute difference of any element; the names must agree."""
    assert left.keys() == right.keys()
    return max(
        float((left[name].float() - right[name].float()).abs().max()) for name in left if left[name].numel()
    )


def assert_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name

"""Models with layers of experts, and their training over ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.experts.layer import Experts, MoE
from tests.runtime import models

CLIP = 0.05  # below every norm here
WIDTH, SAMPLES, STEPS, GAS, EXPERTS = 12, 64, 3, 2, 4
AUX = 0.1
Numbers = list[tuple[float, float]]  # loss and norm of each step


class Layered(nn.Module):
    """Two blocks, each with a layer of experts behind a dense one."""

    def __init__(self, ep_sizes: tuple[int, int], **options: Any) -> None:
        super().__init__()
        settings = {"num_experts": EXPERTS, "k": 1, "min_capacity": 0, "capacity_factor": 1.0, **options}
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "dense": nn.Linear(WIDTH, WIDTH),
                    "moe": MoE(WIDTH, _expert(), ep_size=ep_size, **settings),
                }
            )
            for ep_size in ep_sizes
        )
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        l_aux = x.new_zeros(())
        for block in self.blocks:
            x = x + torch.tanh(block["dense"](x))
            more, aux, _ = block["moe"](x)
            x, l_aux = x + more, l_aux + aux
        return self.last(x), l_aux


def _expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def make_layered(rank: int, ep_size: int | tuple[int, int], **options: Any) -> Layered:
    """Each expert has values of its own, whatever rank it is on."""
    ep_sizes = (ep_size, ep_size) if isinstance(ep_size, int) else ep_size
    torch.manual_seed(0)
    model = Layered(ep_sizes, **options)
    for number, (block, size) in enumerate(zip(model.blocks, ep_sizes, strict=True)):
        set_experts(block["moe"].deepspeed_moe.experts, place=rank % size, seed=100 * number)
    return model


@torch.no_grad()
def set_experts(experts: Experts, *, place: int, seed: int = 0) -> None:
    """Give each expert its own values: those of its number in the model."""
    num_local = experts.num_local_experts
    for local, expert in enumerate(experts.deepspeed_experts):
        draw = torch.Generator().manual_seed(seed + place * num_local + local)
        for param in expert.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=draw))


def loss_of(model: Any, x: Tensor) -> Tensor:
    """As programs have it: with the loss that evens the load out."""
    output, l_aux = model(x)
    result: Tensor = output.float().pow(2).mean() + AUX * l_aux
    return result


def parts_of(step: int, world_size: int) -> list[list[Tensor]]:
    """Return each rank's micro batches of a step."""
    whole = models.batch(step, size=SAMPLES * GAS)
    return [list(part.chunk(GAS)) for part in whole.chunk(world_size)]


def _seed(step: int, rank: int, number: int) -> None:
    """Random tokens are drawn alike, in one process and in several."""
    torch.manual_seed(1000 * step + 10 * rank + number)


def train_plain(model: nn.Module, loss: Callable[..., Tensor] = loss_of, *, world_size: int = 4) -> Numbers:
    """In one process, with each rank's micro batches in a forward of their own: capacity counts there."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    numbers: Numbers = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank, parts in enumerate(parts_of(step, world_size)):
            for number, part in enumerate(parts):
                _seed(step, rank, number)
                one = loss(model, part) / (world_size * GAS)
                one.backward()  # type: ignore[no-untyped-call]
                total += one.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        numbers.append((total, float(norm)))
    return numbers


def train(engine: Any, loss: Callable[..., Tensor] = loss_of) -> Numbers:
    """With an engine on each rank; losses are means over the ranks."""
    numbers: Numbers = []
    rank, world_size = engine.get_data_parallel_rank(), engine.dp_world_size
    for step in range(STEPS):
        total = torch.zeros((), device=engine.device)
        for number, part in enumerate(parts_of(step, world_size)[rank]):
            _seed(step, rank, number)
            one = loss(engine, part.to(engine.device, next(engine.module.parameters()).dtype))
            engine.backward(one)
            engine.step()
            total += one.detach().float() / GAS
        dist.all_reduce(total)
        numbers.append((float(total) / dist.get_world_size(), engine.get_global_grad_norm() or 0.0))
    return numbers


def make_config(stage: int, **changes: Any) -> dict[str, Any]:
    """A ds_config for SGD with a clip below the norm: AdamW would hide gradients of a wrong scale."""
    zero = changes.pop("zero_optimization", {})
    settings = {
        "train_batch_size": SAMPLES * changes.get("gradient_accumulation_steps", GAS),
        "gradient_accumulation_steps": GAS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        **changes,
    }
    config = models.make_config(stage=stage, reduce_bucket_size=300, **settings)
    config["zero_optimization"] |= zero
    return config


def start(model: nn.Module, stage: int, **changes: Any) -> Any:
    """Return an engine with the model."""
    return dslaunch.initialize(model=model, config=make_config(stage, **changes))[0]

"""One rank of bench_parallel.py: trains blocks of a Transformer in two stages, as turn.py says.

python pipeline_worker.py SHAPE TOOL
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.turn import Step, serve

STEPS = 2  # of a turn
PP, MICRO = 2, 8
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}
VOCABULARY = 512
HEAD_DIM = 64


class Shape(NamedTuple):
    """Blocks of a Transformer, and a micro batch."""

    width: int
    blocks: int
    batch: int
    sequence: int


SHAPES = {
    "few tokens": Shape(width=384, blocks=6, batch=1, sequence=32),
    "many tokens": Shape(width=192, blocks=6, batch=2, sequence=128),
}


class Attention(nn.Module):
    """With its norm. The rows of `qkv` lie by heads, so that a part of them is a part of the heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, HEAD_DIM)).permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = x + self.out(attended.transpose(1, 2).flatten(2))
        return result


class Block(Attention):
    """Attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.second = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        result: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return result


def layers(shape: Shape) -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [Block(shape.width) for _ in range(shape.blocks)]
    return [nn.Embedding(VOCABULARY, shape.width), *blocks, nn.Linear(shape.width, VOCABULARY)]


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


Batch = list[tuple[Tensor, Tensor]]  # by micro batch: inputs and labels, [batch, sequence] each


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def _dslaunch(stage: int, schedule: str, shape: Shape) -> Step:
    import dslaunch

    module = dslaunch.PipelineModule(
        layers(shape), PP, loss_fn=loss_of, partition_method="uniform", schedule=schedule
    )
    config = {**config_of(stage), "optimizer": {"type": "AdamW", "params": ADAMW}}
    engine: Any = dslaunch.initialize(model=module, config=config)[0]
    return lambda batch: engine.train_batch(iter(batch)).item()


def _deepspeed(stage: int, shape: Shape) -> Step:
    import deepspeed  # type: ignore[import-not-found]

    deepspeed.init_distributed(dist_backend="gloo")
    module = deepspeed.PipelineModule(layers(shape), PP, loss_fn=loss_of, partition_method="uniform")
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config_of(stage))[0]
    return lambda batch: engine.train_batch(iter(batch)).item()


def _torch(shape: Shape) -> Step:
    """torch's own 1F1B, and DistributedDataParallel's sum by hand, once for a batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (PP, world_size // PP), mesh_dim_names=("pp", "dp"))
    place, every = mesh["pp"].get_local_rank(), layers(shape)
    half = len(every) // PP
    module = nn.Sequential(*every[place * half : (place + 1) * half])
    stage = PipelineStage(module, place, PP, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False, **ADAMW)

    def step(batch: Batch) -> float:
        inputs, labels = (torch.cat(one) for one in zip(*batch, strict=True))
        losses: list[Tensor] = []
        if place == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses)
        if world_size > PP:
            for param in module.parameters():
                dist.all_reduce(param.grad, group=mesh["dp"].get_group())
                param.grad /= world_size // PP
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(mean)
        return mean.item() / (world_size // PP)

    return step


TOOLS: dict[str, Callable[[Shape], Step]] = {
    "torch": _torch,
    **{f"dslaunch {stage}": partial(_dslaunch, stage, "1f1b") for stage in (1, 3)},
    "dslaunch 1, zbv": partial(_dslaunch, 1, "zbv"),
    "DeepSpeed 1": partial(_deepspeed, 1),
}


def batches(shape: Shape, copy: int, turn: int) -> list[Batch]:
    """`copy` is the place of a copy of the model, whose ranks have the same samples."""
    generator = torch.Generator().manual_seed(100 * turn + copy)
    return [
        [
            (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            for _ in range(MICRO)
            for tokens in (torch.randint(VOCABULARY, (shape.batch, shape.sequence + 1), generator=generator),)
        ]
        for _ in range(STEPS)
    ]


def main(shape: Shape, tool: str) -> None:
    copy = int(os.environ["RANK"]) % (int(os.environ["WORLD_SIZE"]) // PP)  # neighbours have the same layers
    serve(lambda: TOOLS[tool](shape), partial(batches, shape, copy))


if __name__ == "__main__":
    main(SHAPES[sys.argv[1]], sys.argv[2])

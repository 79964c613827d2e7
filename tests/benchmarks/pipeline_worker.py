"""One rank of bench_parallel.py: trains blocks of a Transformer in two stages, some steps for each line
that it reads; or, of the shape "bubble", layers that sleep.

python pipeline_worker.py SHAPE TOOL      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

It answers each line with one of JSON: the seconds per step, the loss of the last one, and the largest
resident memory so far.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

STEPS = 2  # of a turn
PP, MICRO = 2, 8
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}
VOCABULARY = 512
SLEEP_S = 0.02  # of a forward, of the gradients of inputs, and of those of parameters


class Shape(NamedTuple):
    """Blocks of a Transformer, and a micro batch."""

    width: int
    blocks: int
    batch: int
    sequence: int


SHAPES = {
    "stages, few tokens": Shape(width=384, blocks=6, batch=1, sequence=32),
    "stages, many tokens": Shape(width=192, blocks=6, batch=2, sequence=128),
}


class Turn(NamedTuple):
    """What some steps took."""

    s: float  # per step
    loss: float  # of the last one
    memory_mb: float  # resident at most so far


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def layers(shape: Shape) -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [Block(shape.width) for _ in range(shape.blocks)]
    return [nn.Embedding(VOCABULARY, shape.width), *blocks, nn.Linear(shape.width, VOCABULARY)]


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


Batch = list[tuple[Tensor, Tensor]]
Step = Callable[[Batch], float]


def _config(stage: int) -> dict[str, Any]:
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
    config = {**_config(stage), "optimizer": {"type": "AdamW", "params": ADAMW}}
    engine: Any = dslaunch.initialize(model=module, config=config)[0]
    return lambda batch: engine.train_batch(iter(batch)).item()


def _deepspeed(stage: int, shape: Shape) -> Step:
    import deepspeed  # type: ignore[import-not-found]

    deepspeed.init_distributed(dist_backend="gloo")
    module = deepspeed.PipelineModule(layers(shape), PP, loss_fn=loss_of, partition_method="uniform")
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=_config(stage))[0]
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


def take_turn(step: Step, shape: Shape, seed: int) -> Turn:
    generator = torch.Generator().manual_seed(seed)
    batches = [
        [
            (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            for _ in range(MICRO)
            for tokens in (torch.randint(VOCABULARY, (shape.batch, shape.sequence + 1), generator=generator),)
        ]
        for _ in range(STEPS)
    ]
    dist.barrier()
    began = time.perf_counter()
    losses = [step(batch) for batch in batches]
    dist.barrier()
    took_s = time.perf_counter() - began
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return Turn(took_s / STEPS, losses[-1], memory_mb)


# ---- layers that sleep


class _Slow(torch.autograd.Function):
    """Takes its time in the forward, and for the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return grad


class _SlowWeight(torch.autograd.Function):
    """Takes its time for the gradient of a parameter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return grad


class Sleeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        slow: Tensor = _Slow.apply(x)  # type: ignore[no-untyped-call]
        weight: Tensor = _SlowWeight.apply(self.weight)  # type: ignore[no-untyped-call]
        return slow * weight


def sleeping(schedule: str) -> Step:
    """One layer a stage: the first one's input wants a gradient, so that all of them take as long."""
    import dslaunch
    from dslaunch.runtime.pipeline.schedule import shape_of

    shape = shape_of(schedule, num_ranks=dist.get_world_size(), per_rank=None)
    module = dslaunch.PipelineModule(
        [Sleeps() for _ in range(shape.num_stages)],
        shape.num_ranks,
        loss_fn=lambda out, y: out.sum(),
        partition_method="uniform",
        schedule=schedule,
    )
    config = {**_config(0), "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    engine: Any = dslaunch.initialize(model=module, config=config)[0]
    batch = [(torch.ones(2, 4, requires_grad=True), torch.zeros(1)) for _ in range(MICRO)]
    return lambda _: engine.train_batch(iter(batch)).item()


def main(name: str, tool: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    answers, sys.stdout = sys.stdout, sys.stderr  # tools print
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo")
    is_asleep = name not in SHAPES
    shape = SHAPES.get(name, next(iter(SHAPES.values())))
    step = sleeping(tool) if is_asleep else TOOLS[tool](shape)
    for turn, _ in enumerate(sys.stdin):
        seed = 100 * turn + rank % (world_size // PP)  # the stages of one copy have the same samples
        print(json.dumps(take_turn(step, shape, seed)._asdict()), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

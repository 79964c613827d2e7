"""One rank of bench_zero.py: trains a model with one tool, some steps for each line that it reads.

python zero_worker.py SHAPE TOOL      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

It answers each line with one of JSON: the seconds per step, the loss of the last one,
and the page faults per step.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 4  # of a turn
VOCABULARY = 512


class Shape(NamedTuple):
    """A model and the batch that each rank takes."""

    width: int
    blocks: int
    batch: int
    sequence: int
    layers: int = 0  # of a block, each a few modules that compute next to nothing; 0: a block of a GPT


MANY_SMALL = "many small modules"
SHAPES = {
    "comm-bound": Shape(width=512, blocks=6, batch=1, sequence=8),  # 19 million parameters, 8 tokens
    "compute-bound": Shape(width=256, blocks=4, batch=8, sequence=128),  # 3.4 million parameters, 1024 tokens
    MANY_SMALL: Shape(
        width=16, blocks=10, batch=1, sequence=8, layers=50
    ),  # 1,000 parameters in 2,000 modules
}
SMALL_WHOLE = (
    ", small parameters whole"  # what stage3_param_persistence_threshold does by default; 0 elsewhere
)
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return result


class Small(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.act, self.drop = nn.Linear(width, width), nn.Tanh(), nn.Identity()
        # 500 of them one after the other: with larger weights the order of a sum decides what is trained
        nn.init.normal_(self.linear.weight, std=0.002)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.drop(self.act(self.linear(x)))
        return result


def _block(shape: Shape) -> nn.Module:
    if shape.layers:
        return nn.Sequential(*(Small(shape.width) for _ in range(shape.layers)))
    return Block(shape.width)


class Gpt(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()  # of a bfloat16 model, too: its losses are compared
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


Step = Callable[[Tensor], Tensor]  # one step on tokens [batch, sequence]; returns the loss


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _engine_loop(engine: Any) -> Step:
    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _plain(model: Gpt) -> Step:
    return _loop(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def _ddp(model: Gpt) -> Step:
    whole = nn.parallel.DistributedDataParallel(model)
    return _loop(whole, torch.optim.AdamW(whole.parameters(), fused=True, **ADAMW))


def _fsdp2(model: Gpt) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def _config(model: Gpt, stage: int, *, keeps_small: bool) -> dict[str, Any]:
    """One block at a time, as fully_shard is told to; `keeps_small`:
    with small parameters whole at stage 3, as by default.
    """
    block = sum(param.numel() for param in model.blocks[0].parameters())
    threshold = {} if keeps_small else {"stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": block, **threshold},
    }


def _dslaunch(stage: int, *, keeps_small: bool = False) -> Callable[[Gpt], Step]:
    def make(model: Gpt) -> Step:
        import dslaunch

        config = {
            **_config(model, stage, keeps_small=keeps_small),
            "optimizer": {"type": "AdamW", "params": ADAMW},
        }
        return _engine_loop(dslaunch.initialize(model=model, config=config)[0])

    return make


def _deepspeed(stage: int, *, keeps_small: bool = False) -> Callable[[Gpt], Step]:
    def make(model: Gpt) -> Step:
        import deepspeed  # type: ignore[import-not-found]

        config = {**_config(model, stage, keeps_small=keeps_small), "zero_allow_untested_optimizer": True}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        return _engine_loop(deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0])

    return make


TOOLS: dict[str, Callable[[Gpt], Step]] = {
    "torch": _plain,
    "DDP": _ddp,
    "FSDP2": _fsdp2,
    **{f"dslaunch {stage}": _dslaunch(stage) for stage in (0, 1, 2, 3)},
    f"dslaunch 3{SMALL_WHOLE}": _dslaunch(3, keeps_small=True),
    **{f"DeepSpeed {stage}": _deepspeed(stage) for stage in (1, 2, 3)},
    f"DeepSpeed 3{SMALL_WHOLE}": _deepspeed(3, keeps_small=True),
}


class Turn(NamedTuple):
    """What some steps took."""

    s: float  # per step
    loss: float  # of the last one
    page_faults: float  # per step


def take_turn(step: Step, shape: Shape, seed: int) -> Turn:
    generator = torch.Generator().manual_seed(seed)
    batches = [
        torch.randint(VOCABULARY, (shape.batch, shape.sequence), generator=generator) for _ in range(STEPS)
    ]
    dist.barrier()
    faults = _page_faults()
    began = time.perf_counter()
    losses = [step(tokens) for tokens in batches]
    dist.barrier()
    took_s = time.perf_counter() - began
    return Turn(took_s / STEPS, losses[-1].item(), (_page_faults() - faults) / STEPS)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main(shape: Shape, tool: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    answers, sys.stdout = sys.stdout, sys.stderr  # tools print
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    step = TOOLS[tool](Gpt(shape))
    for turn, _ in enumerate(sys.stdin):
        print(json.dumps(take_turn(step, shape, 100 * turn + rank)._asdict()), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(SHAPES[sys.argv[1]], sys.argv[2])

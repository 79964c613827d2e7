"""One rank of bench_zero.py: trains the same model with each tool in turn, and rank 0 writes the times as JSON.

python zero_worker.py OUT SHAPE TOOL...      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROUNDS = 5
STEPS = 4  # of each tool in a round
VOCABULARY = 512


class Shape(NamedTuple):
    """A GPT and the batch that each rank takes."""

    width: int
    blocks: int
    batch: int
    sequence: int


SHAPES = {
    "comm-bound": Shape(width=512, blocks=6, batch=1, sequence=8),  # 19 million parameters, 8 tokens
    "compute-bound": Shape(width=256, blocks=4, batch=8, sequence=128),  # 3.4 million parameters, 1024 tokens
}
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


class Gpt(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
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


def _config(model: Gpt, stage: int) -> dict[str, Any]:
    block = sum(param.numel() for param in model.blocks[0].parameters())
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        # one block at a time, as fully_shard is told to
        "zero_optimization": {
            "stage": stage,
            "stage3_prefetch_bucket_size": block,
        },
    }


def _dslaunch(stage: int) -> Callable[[Gpt], Step]:
    def make(model: Gpt) -> Step:
        import dslaunch

        config = {**_config(model, stage), "optimizer": {"type": "AdamW", "params": ADAMW}}
        return _engine_loop(dslaunch.initialize(model=model, config=config)[0])

    return make


def _deepspeed(stage: int) -> Callable[[Gpt], Step]:
    def make(model: Gpt) -> Step:
        import deepspeed  # type: ignore[import-not-found]

        config = {**_config(model, stage), "zero_allow_untested_optimizer": True}
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        return _engine_loop(deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0])

    return make


TOOLS: dict[str, Callable[[Gpt], Step]] = {
    "torch": _plain,
    "DDP": _ddp,
    "FSDP2": _fsdp2,
    **{f"dslaunch {stage}": _dslaunch(stage) for stage in (0, 1, 2, 3)},
    **{f"DeepSpeed {stage}": _deepspeed(stage) for stage in (1, 2, 3)},
}


def main(out: Path, shape: Shape, names: list[str]) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo")
    steps: dict[str, Step] = {}
    for name in names:
        torch.manual_seed(0)
        steps[name] = TOOLS[name](Gpt(shape))
    times: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS + 1):
        for name in names:
            generator = torch.Generator().manual_seed(100 * turn + rank)
            batches = [
                torch.randint(VOCABULARY, (shape.batch, shape.sequence), generator=generator)
                for _ in range(STEPS)
            ]
            dist.barrier()
            began = time.perf_counter()
            seen = [steps[name](tokens) for tokens in batches]
            dist.barrier()
            if turn:
                times[name].append((time.perf_counter() - began) / STEPS)
            losses[name] += [loss.item() for loss in seen]
    if rank == 0:
        found = {name: {"s": statistics.median(times[name]), "losses": losses[name]} for name in names}
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), SHAPES[sys.argv[2]], sys.argv[3:])

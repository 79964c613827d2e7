"""One rank of bench_parallel.py: trains a Llama whose layers are divided over ranks, some steps for each line
that it reads.

python parallel_worker.py SHAPE TOOL      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 4  # of a turn
TP = 2
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}
VOCABULARY = 512


class Shape(NamedTuple):
    """A Llama, and the batch of each group of ranks that computes together."""

    width: int
    blocks: int
    batch: int
    sequence: int


SHAPES = {
    "few tokens": Shape(width=512, blocks=4, batch=1, sequence=16),
    "many tokens": Shape(width=256, blocks=4, batch=4, sequence=128),
}
Step = Callable[[Tensor], Tensor]  # one step on tokens [batch, sequence]; returns the loss


def make_model(shape: Shape) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.width,
            intermediate_size=3 * shape.width,
            num_hidden_layers=shape.blocks,
            num_attention_heads=shape.width // 64,
            num_key_value_heads=shape.width // 64,
            max_position_embeddings=shape.sequence,
            tie_word_embeddings=False,
        )
    )


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": TP},
    }


def _engine_loop(engine: Any) -> Step:
    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _dslaunch(stage: int) -> Callable[[Any], Step]:
    def make(model: Any) -> Step:
        import dslaunch

        config = {**_config(stage), "optimizer": {"type": "AdamW", "params": ADAMW}}
        return _engine_loop(dslaunch.initialize(model=model, config=config)[0])

    return make


def _deepspeed(stage: int) -> Callable[[Any], Step]:
    def make(model: Any) -> Step:
        import deepspeed  # type: ignore[import-not-found]

        config = {**_config(stage), "zero_allow_untested_optimizer": True}
        model = deepspeed.tp_model_init(model, tp_size=TP, dtype=torch.float32, config=config)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        return _engine_loop(deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0])

    return make


def _torch(model: Any) -> Step:
    """torch's own styles, and fully_shard() over the other axis, as torchtitan has them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dp = dist.get_world_size() // TP
    mesh = init_device_mesh("cpu", (dp, TP), mesh_dim_names=("dp", "tp"))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    for block in model.model.layers:
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(block, mesh["tp"], plan)
        if dp > 1:
            fully_shard(block, mesh=mesh["dp"])
    if dp > 1:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **ADAMW)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


TOOLS: dict[str, Callable[[Any], Step]] = {
    "torch": _torch,
    **{f"dslaunch {stage}": _dslaunch(stage) for stage in (1, 3)},
    **{f"DeepSpeed {stage}": _deepspeed(stage) for stage in (1,)},
}


class Turn(NamedTuple):
    """What some steps took."""

    s: float  # per step
    loss: float  # of the last one
    memory_mb: float  # resident at most so far


def take_turn(step: Step, shape: Shape, seed: int) -> Turn:
    generator = torch.Generator().manual_seed(seed)
    batches = [
        torch.randint(VOCABULARY, (shape.batch, shape.sequence), generator=generator) for _ in range(STEPS)
    ]
    dist.barrier()
    began = time.perf_counter()
    losses = [step(tokens) for tokens in batches]
    dist.barrier()
    took_s = time.perf_counter() - began
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return Turn(took_s / STEPS, losses[-1].item(), memory_mb)


def main(shape: Shape, tool: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    answers, sys.stdout = sys.stdout, sys.stderr  # tools print
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo")
    model: nn.Module = make_model(shape)
    step = TOOLS[tool](model)
    for turn, _ in enumerate(sys.stdin):
        seed = 100 * turn + rank // TP  # ranks that compute together have the same samples
        print(json.dumps(take_turn(step, shape, seed)._asdict()), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(SHAPES[sys.argv[1]], sys.argv[2])

"""One rank of bench_parallel.py: trains a Llama whose layers are divided over ranks, as turn.py says.

python tensor_worker.py SHAPE TOOL
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
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.turn import Step, serve

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


def config_of(stage: int, model: Any) -> dict[str, Any]:
    """One block at a time, as fully_shard() is told to."""
    block = sum(param.numel() for param in model.model.layers[0].parameters())
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": block,
            "stage3_prefetch_bucket_size": block,
            "stage3_param_persistence_threshold": 0,
        },
    }


def _config(stage: int, model: Any) -> dict[str, Any]:
    return {**config_of(stage, model), "tensor_parallel": {"autotp_size": TP}}


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

        config = {**_config(stage, model), "optimizer": {"type": "AdamW", "params": ADAMW}}
        return _engine_loop(dslaunch.initialize(model=model, config=config)[0])

    return make


def _deepspeed(stage: int) -> Callable[[Any], Step]:
    def make(model: Any) -> Step:
        import deepspeed  # type: ignore[import-not-found]

        config = {**_config(stage, model), "zero_allow_untested_optimizer": True}
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


def batches(shape: Shape, turn: int) -> list[Tensor]:
    """Ranks that compute together have the same samples."""
    generator = torch.Generator().manual_seed(100 * turn + int(os.environ["RANK"]) // TP)
    return [
        torch.randint(VOCABULARY, (shape.batch, shape.sequence), generator=generator) for _ in range(STEPS)
    ]


def main(shape: Shape, tool: str) -> None:
    serve(lambda: TOOLS[tool](make_model(shape)), partial(batches, shape))


if __name__ == "__main__":
    main(SHAPES[sys.argv[1]], sys.argv[2])

"""One rank of bench_generation.py: it generates with a Llama of transformers by one tool, as often as it is
asked, and answers each line with a `Taken` as JSON.

python generation_worker.py TURN      a `Turn` as JSON, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_disk import FILE_BYTES, ours
from benchmarks.training_worker import numel_of
from benchmarks.turn import Answer, serve, timed
from dslaunch.kernels.disk import DiskEngine

ADAMW = {"type": "AdamW", "params": {"lr": 1e-4}}

Generate = Callable[..., torch.Tensor]


class Turn(NamedTuple):
    """One model that generates, and the tool that it generates by."""

    tool: str
    width: int
    blocks: int
    batch: int
    prompt: int
    new: int
    folder: str = ""  # on the disk from which parameters are streamed; none: they are in memory


class Taken(NamedTuple):
    s: float
    checksum: int  # sum of the tokens, each times its place
    read_bytes: int  # all tokens take so many from the disk
    disk_s: float  # the disk engine alone takes so long for as many bytes of one file


def make_model(turn: Turn) -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=turn.width,
            intermediate_size=turn.width * 11 // 4,
            num_hidden_layers=turn.blocks,
            num_attention_heads=turn.width // 64,
            num_key_value_heads=turn.width // 64,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


def _config(turn: Turn) -> dict[str, Any]:
    block = 4 * turn.width**2 + 3 * turn.width * (turn.width * 11 // 4) + 2 * turn.width
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": block,
        "stage3_prefetch_bucket_size": block,
    }
    if turn.folder:
        zero["offload_param"] = {"device": "nvme", "nvme_path": turn.folder}
    trained = {} if turn.folder else {"optimizer": ADAMW}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **trained}


def make_generate(turn: Turn) -> Generate:
    """Return `generate` of the model, as the tool has it."""
    model = make_model(turn)
    if turn.tool == "transformers":
        return model.generate  # type: ignore[no-any-return]
    if turn.tool.startswith("DeepSpeed"):
        import deepspeed  # type: ignore[import-not-found]

        if turn.tool.endswith("init_inference"):
            return deepspeed.init_inference(model, dtype=torch.float32).generate  # type: ignore[no-any-return]
        engine, *_ = deepspeed.initialize(model=model, config=_config(turn))
        engine.eval()
        return partial(engine.module.generate, synced_gpus=True)
    import dslaunch

    if turn.tool.endswith("init_inference"):
        return dslaunch.init_inference(model, dtype=torch.float32).generate
    engine, *_ = dslaunch.initialize(model=model, config=_config(turn))
    weights = {"gathered": "whole", "unit by unit": "units"}[turn.tool.partition(", ")[2]]

    def generate(*args: Any, **kwargs: Any) -> torch.Tensor:
        with nullcontext() if turn.folder else engine.generating(weights=weights):
            made: torch.Tensor = engine.generate(*args, **kwargs)
        return made

    return generate


def _disk_s(folder: str, num_bytes: int) -> float:
    """Return how long the disk engine alone needs for so many bytes of one file."""
    path, times = Path(folder) / "measured", max(1, round(num_bytes / FILE_BYTES))
    with DiskEngine(num_threads=1) as engine, engine.create(path, FILE_BYTES), ours() as move:
        move("write", path)
        taken = sum(move("read", path) for _ in range(times))
    path.unlink()
    return taken * num_bytes / (times * FILE_BYTES)


def prepare() -> Answer:
    turn = Turn(**json.loads(sys.argv[1]))
    generate = make_generate(turn)
    rank = int(os.environ["RANK"])
    of_rank = torch.Generator().manual_seed(rank)
    prompts = torch.randint(3, 512, (turn.batch, turn.prompt), generator=of_rank)
    num_bytes = numel_of(make_model(turn)) * 4 * turn.new if turn.folder else 0

    def answer(number: int, line: str) -> Taken:
        made: list[torch.Tensor] = []
        length = {"max_new_tokens": turn.new, "min_new_tokens": turn.new}

        def run() -> None:
            inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
            with torch.no_grad():
                made.append(generate(**inputs, **length, do_sample=False))

        taken = timed(run)
        checksum = int((made[0] * torch.arange(1, made[0].numel() + 1).view_as(made[0])).sum())
        return Taken(taken, checksum, num_bytes, _disk_s(turn.folder, num_bytes) if turn.folder else 0.0)

    return answer


if __name__ == "__main__":
    serve(prepare)

"""One rank of bench_parallel.py: trains a Llama on sequences of which each rank has a part, as turn.py says.

python sequence_worker.py SHAPE TOOL
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tensor_worker import ADAMW, VOCABULARY, Shape, config_of, make_model
from benchmarks.turn import Step, serve

STEPS = 2  # of a turn
SP = 4
ATTENTION = "sdpa"
SHAPES = {
    "short sequences": Shape(width=512, blocks=4, batch=1, sequence=64),
    "long sequences": Shape(width=256, blocks=4, batch=1, sequence=2048),
}


def _part(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's tokens, labels and positions. Labels are shifted before, as the next token may be the next
    rank's.
    """
    labels = F.pad(tokens, (0, 1), value=-100)[:, 1:]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    parts = (one.chunk(SP, dim=1)[dist.get_rank()].contiguous() for one in (tokens, labels, positions))
    tokens, labels, positions = parts
    return tokens, labels, positions


def _dslaunch(stage: int, shape: Shape) -> Step:
    import dslaunch
    from dslaunch.runtime.sequence.hugging_face import UlyssesSPAttentionHF
    from dslaunch.runtime.sequence.loss import mean_over_tokens

    model = make_model(shape)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, ATTENTION, sequence_parallel_size=SP)
    config = {**config_of(stage, model), "optimizer": {"type": "AdamW", "params": ADAMW}}
    engine: Any = dslaunch.initialize(model=model, mpu=mpu, config=config)[0]

    def step(tokens: Tensor) -> Tensor:
        tokens, labels, positions = _part(tokens)
        logits = engine(input_ids=tokens, position_ids=positions, use_cache=False).logits
        loss = mean_over_tokens(logits, labels)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _deepspeed(stage: int, shape: Shape) -> Step:
    """The loss is each rank's part of the mean, of which DeepSpeed's engine adds up the gradients."""
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # type: ignore[import-not-found]
        UlyssesSPAttentionHF,
    )

    deepspeed.init_distributed(dist_backend="gloo")
    model = make_model(shape)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, ATTENTION, SP, micro_batch_size=shape.batch)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    config = {**config_of(stage, model), "zero_allow_untested_optimizer": True}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]

    def step(tokens: Tensor) -> Tensor:
        tokens, labels, positions = _part(tokens)
        logits = engine(input_ids=tokens, position_ids=positions, use_cache=False).logits
        total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        told = torch.stack((total.detach(), (labels != -100).sum().float()))
        dist.all_reduce(told)
        engine.backward(total / told[1])
        engine.step()
        return told[0] / told[1]

    return step


TOOLS: dict[str, Callable[[Shape], Step]] = {
    **{f"dslaunch {stage}": partial(_dslaunch, stage) for stage in (1, 3)},
    **{f"DeepSpeed {stage}": partial(_deepspeed, stage) for stage in (1, 3)},
}


def batches(shape: Shape, turn: int) -> list[Tensor]:
    """All ranks have the same sequences."""
    generator = torch.Generator().manual_seed(turn)
    return [
        torch.randint(VOCABULARY, (shape.batch, shape.sequence), generator=generator) for _ in range(STEPS)
    ]


def main(shape: Shape, tool: str) -> None:
    serve(lambda: TOOLS[tool](shape), partial(batches, shape))


if __name__ == "__main__":
    main(SHAPES[sys.argv[1]], sys.argv[2])

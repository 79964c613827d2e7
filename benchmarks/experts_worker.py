"""One rank of bench_parallel.py: trains blocks of a Transformer whose MLPs are layers of experts, of which
each rank has another part, as turn.py says.

python experts_worker.py SHAPE TOOL
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pipeline_worker import ADAMW, VOCABULARY, Attention, Shape, loss_of
from benchmarks.turn import Step, serve

STEPS = 4  # of a turn
EP, EXPERTS = 4, 8
AUX = 0.01  # of the loss that evens the load out
SHAPES = {
    "few tokens": Shape(width=256, blocks=4, batch=1, sequence=32),
    "many tokens": Shape(width=128, blocks=4, batch=4, sequence=128),
}


class Model(nn.Module):
    """`moe` is DeepSpeed's MoE, or ours. Tokens beyond an expert's capacity are dropped in their order, so
    that both drop the same.
    """

    def __init__(self, moe: Any, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.attention = nn.ModuleList(Attention(width) for _ in range(shape.blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(shape.blocks))
        self.experts = nn.ModuleList(
            moe(
                hidden_size=width,
                expert=nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                num_experts=EXPERTS,
                ep_size=EP,
                use_rts=False,
            )
            for _ in range(shape.blocks)
        )

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, even = self.embed(tokens), torch.zeros(())
        for attention, norm, experts in zip(self.attention, self.norms, self.experts, strict=True):
            x = attention(x)
            more, l_aux, _ = experts(norm(x))
            x, even = x + more, even + l_aux
        return loss_of(self.head(x), labels) + AUX * even


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }


def _loop(engine: Any) -> Step:
    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _dslaunch(stage: int, shape: Shape) -> Step:
    import dslaunch
    from dslaunch.moe import MoE

    config = {**_config(stage), "optimizer": {"type": "AdamW", "params": ADAMW}}
    return _loop(dslaunch.initialize(model=Model(MoE, shape), config=config)[0])


def _deepspeed(stage: int, shape: Shape) -> Step:
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.moe.layer import MoE  # type: ignore[import-not-found]
    from deepspeed.moe.utils import (  # type: ignore[import-not-found]
        split_params_into_different_moe_groups_for_optimizer,
    )

    deepspeed.init_distributed(dist_backend="gloo")
    model = Model(MoE, shape)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    optimizer = torch.optim.AdamW(groups, fused=True, **ADAMW)
    config = {**_config(stage), "zero_allow_untested_optimizer": True}
    return _loop(deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0])


TOOLS: dict[str, Callable[[Shape], Step]] = {
    **{f"dslaunch {stage}": partial(_dslaunch, stage) for stage in (2, 3)},
    "DeepSpeed 2": partial(_deepspeed, 2),
}


def batches(shape: Shape, turn: int) -> list[Tensor]:
    """Each rank has samples of its own, one token longer than what is seen."""
    generator = torch.Generator().manual_seed(100 * turn + int(os.environ["RANK"]))
    size = (shape.batch, shape.sequence + 1)
    return [torch.randint(VOCABULARY, size, generator=generator) for _ in range(STEPS)]


def main(shape: Shape, tool: str) -> None:
    serve(lambda: TOOLS[tool](shape), partial(batches, shape))


if __name__ == "__main__":
    main(SHAPES[sys.argv[1]], sys.argv[2])

"""The program whose steps bench_plan_time.py plans and times: a small GPT with random tokens."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dslaunch
from benchmarks.models import VOCABULARY, Gpt, Shape

NUM_WARM = 3
MARK = "a step: "


class Checkpointed(nn.Module):
    """A block that is computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block does."""
        again: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return again


def main() -> None:
    """Train; rank 0 prints the median time of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpointed", action="store_true")
    parser.add_argument("--local_rank", type=int)
    args = dslaunch.add_config_arguments(parser).parse_args()
    torch.manual_seed(0)
    model: Any = Gpt(Shape(width=args.width, blocks=args.blocks, batch=0, sequence=args.sequence))
    if args.checkpointed:
        model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    engine, *_ = dslaunch.initialize(args=args, model=model, model_parameters=model.parameters())
    size = engine.train_micro_batch_size_per_gpu(), args.sequence
    tokens = torch.randint(VOCABULARY, size, device=engine.device)
    times = []
    for _ in range(NUM_WARM + args.steps):
        began = time.perf_counter()
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(tokens))
            engine.step()
        times.append(time.perf_counter() - began)
    if engine.global_rank == 0:
        print(f"{MARK}{statistics.median(times[NUM_WARM:])}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

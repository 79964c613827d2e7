"""Optimizers of dslaunch.ops beside torch's, as a training loop calls them: optimizer.step() in host memory.

    python benchmarks/bench_ops.py

Each line is the best of many runs, alternating between the two, so that a busy machine slows both. torch /
dslaunch above 1 means dslaunch is faster. torch's is asked for foreach, which is what it takes by default on
a GPU, and for fused where it has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_kernels import best_s
from dslaunch.ops.adagrad import DeepSpeedCPUAdagrad
from dslaunch.ops.adam import FusedAdam

MIN_MEASURE_S = 1.0
MODELS: dict[str, list[tuple[int, ...]]] = {
    "500 x 64": [(64,)] * 500,
    "100 x 128 x 128": [(128, 128)] * 100,
    "24 x 1024 x 1024": [(1024, 1024)] * 24,
}
PAIRS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[Any], torch.optim.Optimizer]]] = {
    "FusedAdam / AdamW(foreach)": (FusedAdam, lambda params: torch.optim.AdamW(params, foreach=True)),
    "FusedAdam / AdamW(fused)": (FusedAdam, lambda params: torch.optim.AdamW(params, fused=True)),
    "Adagrad / Adagrad(foreach)": (
        DeepSpeedCPUAdagrad,
        lambda params: torch.optim.Adagrad(params, foreach=True),
    ),
}


def made(
    make: Callable[[Any], torch.optim.Optimizer], shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> torch.optim.Optimizer:
    """The optimizer after its first step, with gradients."""
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = make(params)
    optimizer.step()
    return optimizer


def main() -> None:
    """Print one line for each pair, model and dtype."""
    print(f"{'':28}{'parameters':20}{'dtype':10}{'dslaunch ms':>12}{'torch ms':>10}{'torch / dslaunch':>18}")
    for name, pair in PAIRS.items():
        for model, shapes in MODELS.items():
            for dtype in (torch.float32, torch.bfloat16):
                steps = {place: made(make, shapes, dtype).step for place, make in enumerate(pair)}
                ours, torchs = best_s(steps, MIN_MEASURE_S).values()
                kind = str(dtype).removeprefix("torch.")
                print(
                    f"{name:28}{model:20}{kind:10}{ours * 1e3:12.2f}{torchs * 1e3:10.2f}{torchs / ours:18.2f}"
                )


if __name__ == "__main__":
    main()

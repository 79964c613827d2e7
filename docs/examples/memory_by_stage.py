"""Measure what a rank holds of a model at each ZeRO stage, beside plain PyTorch in one process.

    dslaunch --num_gpus 4 docs/examples/memory_by_stage.py

Counted are the bytes of all tensors of rank 0 after a backward: parameters, gradients and AdamW's states.
With --out DIR rank 0 writes them to memory_by_stage.json there.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dslaunch

WIDTH = 384
DEPTH = 4
NUM_SAMPLES = 2
STAGES = (0, 1, 2, 3)
ALONE = "PyTorch, 1 process"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a rank holds of a model at each ZeRO stage.")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write memory_by_stage.json there")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU even where there is a GPU")
    args = parser.parse_args()
    dslaunch.init_distributed(dist_backend="gloo" if args.cpu else None)
    bytes_held = {ALONE: held_by_torch()}
    for stage in STAGES:
        bytes_held[f"stage {stage}"] = held_at_stage(stage)
    if dist.get_rank() == 0:
        for name, held in bytes_held.items():
            ranks = "" if name == ALONE else f" on each of {dist.get_world_size()} ranks"
            print(f"{name:20} {held / 2**20:6.1f} MiB{ranks}", flush=True)
        if args.out:
            text = json.dumps({"world_size": dist.get_world_size(), "bytes": bytes_held}, indent=2)
            (args.out / "memory_by_stage.json").write_text(text + "\n")
    dist.destroy_process_group()


def make_model() -> nn.Module:
    """Blocks of two layers, of 4.7 million parameters in all."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(DEPTH)
        )
    )


def held_by_torch() -> int:
    """The bytes of parameters, gradients and AdamW's states without an engine."""
    before = live_bytes()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(2):
        optimizer.step()  # the first one has no gradients, and does nothing
        optimizer.zero_grad()
        model(torch.ones(NUM_SAMPLES, WIDTH)).square().mean().backward()
    optimizer.step()  # now it has states
    return live_bytes() - before


def held_at_stage(stage: int) -> int:
    """The same with an engine at this stage.

    Order: a collective
    """
    before = live_bytes()
    model = make_model()
    engine, *_ = dslaunch.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": NUM_SAMPLES,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    samples = torch.ones(NUM_SAMPLES, WIDTH, device=engine.device)
    for has_step in (True, False):  # the first step makes the states
        engine.backward(engine(samples).square().mean())
        if has_step:
            engine.step()
    held = live_bytes() - before - samples.nbytes
    engine.destroy()
    return held


def live_bytes() -> int:
    """The memory of all tensors of this process."""
    gc.collect()
    tensors = (one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter))
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    main()

"""Count what a model computes: without an engine, around a part of a program, and in a training step.

    dslaunch --num_gpus 2 docs/examples/deepspeed/profile_flops.py

MACs are multiply-accumulate operations of matrix products, convolutions and attention;
a profile has the latencies, too.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import deepspeed
import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from torch import nn


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def profile_alone():
    flops, macs, params = get_model_profile(
        make_model(), input_shape=(4, 1, 8, 8), print_profile=False, detailed=False, as_string=False
    )
    print(f"alone: macs {int(macs)} params {int(params)} flops at least twice the macs {flops >= 2 * macs}")


def profile_by_hand(model, images):
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(images)
    profiler.stop_profile()
    macs, params = profiler.get_total_macs(), profiler.get_total_params()
    took = profiler.get_total_duration() > 0
    profiler.end_profile()
    print(f"by hand: macs {int(macs)} params {int(params)} took time {took}", flush=True)


def profile_training(folder, *, is_first):
    report = folder / "profile.txt"
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": 1},
        "flops_profiler": {
            "enabled": True,
            "profile_step": 2,
            "module_depth": -1,
            "top_modules": 3,
            "detailed": True,
            "output_file": str(report),
        },
    }
    model = make_model()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(3):
        images = torch.ones(4, 1, 8, 8, device=engine.device)
        engine.backward(engine(images).square().mean())
        engine.step()
    if is_first:
        lines = report.read_text().splitlines()
        found = next(line for line in lines if "MAC" in line and "Conv2d" in line)
        print(f"in training: {found.strip()}", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Profile a model.")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    if args.local_rank == 0:
        profile_alone()
        profile_by_hand(make_model(), torch.ones(4, 1, 8, 8))
    with TemporaryDirectory() as folder:
        profile_training(Path(folder), is_first=args.local_rank == 0)


if __name__ == "__main__":
    main()

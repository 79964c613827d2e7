"""AdamW and the norm on a CUDA device: dslaunch's kernels beside torch's, and beside what the memory can do.

    python benchmarks/bench_cuda_kernels.py

A step moves 28 bytes per element (param, exp_avg and exp_avg_sq read and written, gradient read, and with
16-bit types the copy written); GB/s counts those, for torch's passes too, so the quotient of two rates is
that of the times. `of copy` is the share of the rate at which the same device copies one large array into
another, in the same run. Times are the shortest of many, between two events on the stream. `host` is how long
the call itself keeps the processor, which overlaps with the device's work.

First use: a fresh process with an empty cache, and one that finds the code there;
what torch itself takes is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dslaunch.kernels import ADAM, AdamSegment, AdamShard
from dslaunch.kernels.cuda import NORM_OUT_NUMEL, squared_norm, step

LENGTHS = (2**16, 2**20, 2**24, 2**28)
MANY = [4096 * 4096, 4096, 4096 * 11008, 4096 * 1024, 4096] * 8  # 40 parameters as a model has them, not flat
COPY_NUMEL = 2**28
NUM_RUNS = 30
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FIRST_USE = """
import time, torch
from dslaunch.kernels import ADAM
from dslaunch.kernels.cuda import step
from benchmarks.bench_cuda_kernels import bf16_shard
shard = bf16_shard(1000)
torch.cuda.synchronize()
start = time.perf_counter()
step(ADAM, [shard], mode=1, stream=torch.cuda.current_stream().cuda_stream)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The same work done by dslaunch and by torch."""

    name: str
    numel: int
    bytes_per_element: int
    ours: Callable[[], object]
    torchs: Callable[[], object]


def stream() -> int:
    """Return the current stream in the kernels' form."""
    return torch.cuda.current_stream().cuda_stream


def best_s(call: Callable[[], object]) -> tuple[float, float]:
    """Return the shortest time on the device, and of the call on the host."""
    for _ in range(3):  # compiles, allocates
        call()
    torch.cuda.synchronize()
    on_device = on_host = float("inf")
    for _ in range(NUM_RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        start = time.perf_counter()
        call()
        on_host = min(on_host, time.perf_counter() - start)
        end.record()
        end.synchronize()
        on_device = min(on_device, begin.elapsed_time(end) / 1e3)
    return on_device, on_host


def segment(numel: int) -> AdamSegment:
    return AdamSegment(
        offset=0, numel=numel, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10
    )


def bf16_shard(numel: int) -> AdamShard:
    """bfloat16 gradient and model, float32 master and moments."""
    return AdamShard(
        param=torch.randn(numel, device="cuda"),
        grads=((0, torch.randn(numel, device="cuda").bfloat16()),),
        exp_avg=torch.zeros(numel, device="cuda"),
        exp_avg_sq=torch.zeros(numel, device="cuda"),
        segments=(segment(numel),),
        param_out=torch.empty(numel, dtype=torch.bfloat16, device="cuda"),
    )


def step_float32(numels: list[int], name: str) -> Work:
    """Gradient, parameter and moments in float32; torch's fused AdamW is one pass too."""
    params = [torch.nn.Parameter(torch.randn(numel, device="cuda")) for numel in numels]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = torch.optim.AdamW(params, **HYPER, fused=True)
    shards = [
        AdamShard(
            param=torch.randn(numel, device="cuda"),
            grads=((0, torch.randn(numel, device="cuda")),),
            exp_avg=torch.zeros(numel, device="cuda"),
            exp_avg_sq=torch.zeros(numel, device="cuda"),
            segments=(segment(numel),),
        )
        for numel in numels
    ]
    return Work(
        name=name,
        numel=sum(numels),
        bytes_per_element=28,
        ours=lambda: step(ADAM, shards, mode=1, stream=stream()),
        torchs=optimizer.step,
    )


def step_bfloat16(numel: int) -> Work:
    """bfloat16 gradient in, unscaled; float32 master; bfloat16 parameter out. torch needs four passes."""
    shard = bf16_shard(numel)
    grad = torch.randn(numel, device="cuda").bfloat16()
    master = torch.nn.Parameter(torch.randn(numel, device="cuda"))
    master.grad = torch.empty_like(master)
    model = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
    optimizer = torch.optim.AdamW([master], **HYPER, fused=True)

    def passes() -> None:
        assert master.grad is not None
        master.grad.copy_(grad).mul_(0.5)
        optimizer.step()
        model.copy_(master.detach())

    return Work(
        name="step, bfloat16 grad and copy",
        numel=numel,
        bytes_per_element=28,
        ours=lambda: step(ADAM, [shard], mode=1, grad_scale=0.5, stream=stream()),
        torchs=passes,
    )


def norm_bfloat16(numel: int) -> Work:
    """Both add in float64."""
    grad = torch.randn(numel, device="cuda").bfloat16()
    out = torch.empty(NORM_OUT_NUMEL, dtype=torch.float64, device="cuda")
    return Work(
        name="squared_norm, bfloat16",
        numel=numel,
        bytes_per_element=2,
        ours=lambda: squared_norm([grad], out=out, stream=stream()),
        torchs=lambda: torch.linalg.vector_norm(grad, dtype=torch.float64),
    )


def works(lengths: Sequence[int]) -> Iterator[Work]:
    for numel in lengths:
        yield step_float32([numel], "step, float32 grad")
        yield step_bfloat16(numel)
        yield norm_bfloat16(numel)
    yield step_float32(MANY, f"step, {len(MANY)} parameters")


def copy_rate() -> float:
    """Return the bytes per second that are read and written when one array is copied into another."""
    source = torch.empty(COPY_NUMEL, device="cuda")
    target = torch.empty_like(source)
    return 2 * 4 * COPY_NUMEL / best_s(lambda: target.copy_(source))[0]


def first_use_s() -> tuple[float, float]:
    """Return how long the first step takes in a process: with an empty cache, and with a full one."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "DSLAUNCH_CACHE_DIR": folder, "PYTHONPATH": path}
        times = [
            float(
                subprocess.run(
                    [sys.executable, "-c", FIRST_USE],
                    env=environment,
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
            )
            for _ in range(2)
        ]
    return times[0], times[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", action="store_true", help="the longest alone, a line of JSON each")
    is_first = parser.parse_args().first
    if is_first:
        torch.cuda.init()  # says why there is no device
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    torch.manual_seed(0)
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies {rate / 1e9:.0f} GB/s")
    print(f"{'':<42}{'dslaunch':>28}{'torch':>20}{'torch /':>9}")
    print(
        f"{'work':<30}{'length':>12}{'GB/s':>8}{'of copy':>9}"
        f"{'host us':>11}{'GB/s':>9}{'host us':>11}{'dslaunch':>9}"
    )
    for work in works(LENGTHS[-1:] if is_first else LENGTHS):
        ours_s, ours_host_s = best_s(work.ours)
        torchs_s, torchs_host_s = best_s(work.torchs)
        num_bytes = work.numel * work.bytes_per_element
        print(
            f"{work.name:<30}{work.numel:>12}"
            f"{num_bytes / ours_s / 1e9:>8.0f}{num_bytes / ours_s / rate:>9.2f}"
            f"{ours_host_s * 1e6:>11.0f}{num_bytes / torchs_s / 1e9:>9.0f}{torchs_host_s * 1e6:>11.0f}"
            f"{torchs_s / ours_s:>9.2f}",
            flush=True,
        )
        if is_first:
            line = {"name": f"{work.name}, {work.numel}", "GB/s": round(num_bytes / ours_s / 1e9)}
            line |= {"of_copy": round(num_bytes / ours_s / rate, 2), "torch": round(torchs_s / ours_s, 2)}
            print(json.dumps(line), flush=True)
        torch.cuda.empty_cache()
    if is_first:
        return
    compiled_s, cached_s = first_use_s()
    print(f"the first step of a process: {compiled_s:.2f} s compiled, {cached_s:.2f} s from the cache")


if __name__ == "__main__":
    main()

"""AdamW and gradient norm on the CPU: dslaunch's kernels beside torch doing the same work, in one run.

    python tests/benchmarks/bench_adam.py

Each line is the best of many runs, alternating between the two, so that a busy machine slows both. GB/s counts the
bytes that have to move: 28 per element for a step (param, exp_avg and exp_avg_sq read and written, plus the
gradient, plus the bfloat16 copy where there is one). torch / dslaunch above 1 means dslaunch is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dslaunch.kernels import AdamSegment, AdamShard, adamw_step, squared_norm

LENGTHS = (2**14, 2**17, 2**20, 2**24)
THREADS = (1, 2)
MIN_MEASURE_S = 0.6
MIN_RUNS = 10
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The same work done by dslaunch and by torch."""

    name: str
    bytes_per_element: int
    ours: Callable[[], object]
    torchs: Callable[[], object]


def best_s(work: Work) -> tuple[float, float]:
    """Return the shortest time of one call of each side."""
    work.ours()
    work.torchs()  # the first calls touch new memory and import
    best_ours = best_torchs = float("inf")
    end = time.perf_counter() + MIN_MEASURE_S
    num_runs = 0
    while time.perf_counter() < end or num_runs < MIN_RUNS:
        num_runs += 1
        start = time.perf_counter()
        work.ours()
        middle = time.perf_counter()
        work.torchs()
        stop = time.perf_counter()
        best_ours = min(best_ours, middle - start)
        best_torchs = min(best_torchs, stop - middle)
    return best_ours, best_torchs


def step_float32(numel: int, num_threads: int) -> Work:
    """Gradient, parameter and moments in float32; torch's fused AdamW is one pass too."""
    param, exp_avg, exp_avg_sq = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    grad = torch.randn(numel)
    shard = AdamShard(
        param=param, grads=((0, grad),), exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, segments=(segment(numel),)
    )
    master = torch.nn.Parameter(param.clone())
    master.grad = grad.clone()
    optimizer = torch.optim.AdamW([master], **HYPER, fused=True)
    return Work(
        name="step, float32 grad",
        bytes_per_element=28,
        ours=lambda: adamw_step((shard,), num_threads=num_threads),
        torchs=optimizer.step,
    )


def step_bfloat16(numel: int, num_threads: int) -> Work:
    """bfloat16 gradient in, unscaled; float32 master; bfloat16 parameter out. torch needs four passes."""
    param, exp_avg, exp_avg_sq = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    grad = torch.randn(numel).bfloat16()
    param_out = torch.empty(numel, dtype=torch.bfloat16)
    shard = AdamShard(
        param=param,
        grads=((0, grad),),
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        segments=(segment(numel),),
        param_out=param_out,
    )
    master = torch.nn.Parameter(param.clone())
    master_grad = torch.empty(numel)
    master.grad = master_grad
    model_param = torch.empty(numel, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([master], **HYPER, fused=True)

    def passes() -> None:
        master_grad.copy_(grad)
        master_grad.mul_(0.5)
        optimizer.step()
        model_param.copy_(master.detach())

    return Work(
        name="step, bfloat16 grad and copy",
        bytes_per_element=28,
        ours=lambda: adamw_step((shard,), grad_scale=0.5, num_threads=num_threads),
        torchs=passes,
    )


def norm_float32(numel: int, num_threads: int) -> Work:
    """Sum of squares; torch adds in float32, dslaunch in float64."""
    grad = torch.randn(numel)
    return Work(
        name="squared_norm, float32",
        bytes_per_element=4,
        ours=lambda: squared_norm((grad,), num_threads),
        torchs=lambda: torch.linalg.vector_norm(grad).item() ** 2,
    )


def norm_bfloat16(numel: int, num_threads: int) -> Work:
    """Sum of squares; torch adds in float32, dslaunch in float64."""
    grad = torch.randn(numel).bfloat16()
    return Work(
        name="squared_norm, bfloat16",
        bytes_per_element=2,
        ours=lambda: squared_norm((grad,), num_threads),
        torchs=lambda: torch.linalg.vector_norm(grad, dtype=torch.float32).item() ** 2,
    )


def segment(numel: int) -> AdamSegment:
    return AdamSegment(
        offset=0,
        numel=numel,
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.01,
        step=10,
    )


def rows() -> Iterator[str]:
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        for make in (step_float32, step_bfloat16, norm_float32, norm_bfloat16):
            for numel in LENGTHS:
                work = make(numel, num_threads)
                ours_s, torchs_s = best_s(work)
                ours_ns, torchs_ns = ours_s / numel * 1e9, torchs_s / numel * 1e9
                yield (
                    f"{work.name:<30}{num_threads:>8}{numel:>10}{ours_ns:>10.3f}{work.bytes_per_element / ours_ns:>8.1f}"
                    f"{torchs_ns:>10.3f}{work.bytes_per_element / torchs_ns:>8.1f}{torchs_ns / ours_ns:>9.2f}"
                )


def main() -> None:
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"{'':<30}{'':>8}{'':>10}{'dslaunch':>18}{'torch':>18}{'torch /':>9}")
    print(
        f"{'work':<30}{'threads':>8}{'length':>10}{'ns/elem':>10}{'GB/s':>8}{'ns/elem':>10}{'GB/s':>8}{'dslaunch':>9}"
    )
    for row in rows():
        print(row, flush=True)


if __name__ == "__main__":
    main()

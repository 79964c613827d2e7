"""The optimizer kernels on the CPU: beside a copy of memory, and beside torch and DeepSpeed
doing the same work.

    python benchmarks/bench_kernels.py [--short] [--publish]

Those that are compared take turns in one process, and each has the best of its times, so that a busy machine
slows all. GB/s counts what has to move, each read and each write once; the copy is of float32 arrays of the
same length by a plain parallel loop of our own (benchmarks/memory_copy.cpp) on as many threads. --short
measures little and is to see that the command works. --publish writes the tables into
docs/reference/benchmarks.md. Nothing here fails on a time.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.guide_section import CHECKOUT, arguments, conditions, goal, paragraphs, publish, table
from benchmarks.kernel_works import (
    Work,
    bf16_step,
    fp32_step,
    kernel_works,
    load_deepspeed_adam,
    narrow_work,
)
from benchmarks.memory_copy import build_copy

COMMAND = "make bench-kernels"
DEEPSPEED_BUILD = CHECKOUT / "build" / "deepspeed"
COPY, TORCH_COPY = "copy loop", "torch copy_"
COPY_BYTES = 8  # a float32 read, a float32 written
NUMEL, SHORT_NUMEL = 2**24, 2**18
SHARE_GOAL = 0.9
DEEPSPEED_GOAL = 0.6
NARROW_GOAL = 1.05

K = TypeVar("K")


def best_s(calls: Mapping[K, Callable[[], object]], min_s: float) -> dict[K, float]:
    """The shortest time of one call of each; they take turns for at least `min_s` and three rounds."""
    for call in calls.values():
        call()  # touches new memory
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + min_s
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        rounds += 1
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def gb_per_s(num_bytes: int, numel: int, seconds: float) -> float:
    return num_bytes * numel / seconds / 1e9


def kernel_rows(
    copies: Callable[[int], dict[str, Callable[[], object]]], numel: int, min_s: float
) -> list[list[str]]:
    rows = []
    for num_threads in thread_counts():
        torch.set_num_threads(num_threads)
        for work in kernel_works(numel, num_threads):
            times = best_s({**work.calls, **copies(num_threads)}, min_s)
            ours = gb_per_s(work.num_bytes, numel, times["dslaunch"])
            loop, torchs = (gb_per_s(COPY_BYTES, numel, times[name]) for name in (COPY, TORCH_COPY))
            rows.append(
                [
                    work.name,
                    str(num_threads),
                    f"{times['dslaunch'] / numel * 1e9:.3f}",
                    f"{ours:.1f}",
                    f"{loop:.1f}",
                    f"{torchs:.1f}",
                    f"{ours / loop:.2f}",
                    goal(ours / loop, SHARE_GOAL, ">="),
                ]
            )
            print("  ".join(rows[-1]), flush=True)
    return rows


def peer_rows(
    make: Callable[[int, int], Work], numel: int, min_s: float, limit: float | None
) -> list[list[str]]:
    rows = []
    for num_threads in thread_counts():
        torch.set_num_threads(num_threads)
        work = make(numel, num_threads)
        times = best_s(work.calls, min_s)
        for peer, seconds in times.items():
            ratio = times["dslaunch"] / seconds
            rows.append(
                [
                    work.name,
                    str(num_threads),
                    peer,
                    f"{seconds / numel * 1e9:.3f}",
                    f"{ratio:.2f}",
                    goal(ratio, limit) if limit is not None and peer == "DeepSpeed" else "",
                ]
            )
            print("  ".join(rows[-1]), flush=True)
    return rows


def narrow_rows(numel: int, min_s: float) -> list[list[str]]:
    rows = []
    for num_threads in thread_counts():
        times = best_s(narrow_work(numel, num_threads).calls, min_s)
        wide = next(iter(times.values()))
        for name, seconds in times.items():
            ratio = seconds / wide
            limit = goal(ratio, NARROW_GOAL) if seconds != wide else ""
            rows.append([name, str(num_threads), f"{seconds / numel * 1e9:.3f}", f"{ratio:.2f}", limit])
            print("  ".join(rows[-1]), flush=True)
    return rows


def thread_counts() -> list[int]:
    return sorted({1, len(os.sched_getaffinity(0))})


def measure(numel: int, min_s: float) -> str:
    """Return the tables as Markdown."""
    torch.manual_seed(0)
    deepspeed_adam, why_none = load_deepspeed_adam(DEEPSPEED_BUILD)
    source, to, other = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    with tempfile.TemporaryDirectory() as folder:
        copy = build_copy(Path(folder))

        def copies(num_threads: int) -> dict[str, Callable[[], object]]:
            return {COPY: lambda: copy(to, source, num_threads), TORCH_COPY: lambda: other.copy_(source)}

        of_kernels = kernel_rows(copies, numel, min_s)
    peers = [
        *peer_rows(lambda n, t: fp32_step(n, t, deepspeed_adam), numel, min_s, None),
        *peer_rows(lambda n, t: bf16_step(n, t, deepspeed_adam), numel, min_s, DEEPSPEED_GOAL),
    ]
    narrow = narrow_rows(numel, min_s)
    narrow_head = ["AdamW with", "threads", "ns / element", "time / float32's", "goal"]
    head = [
        "kernel",
        "threads",
        "ns / element",
        "GB/s",
        f"{COPY}, GB/s",
        f"{TORCH_COPY}, GB/s",
        f"share of the {COPY}",
        "goal",
    ]
    peer_head = ["work", "threads", "by", "ns / element", "dslaunch's time / this", "goal"]
    about = f"{conditions()}, torch {torch.__version__}; {numel:,} elements, best of the runs, taking turns."
    without = f"Without DeepSpeed: {why_none}." if why_none else ""
    return paragraphs(
        about,
        without,
        table(head, of_kernels),
        table(peer_head, peers),
        "A step whose states and masters have fewer bits, rounded by random bits:",
        table(narrow_head, narrow),
    )


def main() -> None:
    parser = arguments(__doc__, short="small arrays and few runs: does it work?")
    options = parser.parse_args()
    if options.short and options.publish:
        parser.error("--short --publish: a short measurement is not worth publishing; leave one of them out")
    text = measure(SHORT_NUMEL, 0.05) if options.short else measure(NUMEL, 4.0)
    publish(COMMAND, text, is_wanted=options.publish)


if __name__ == "__main__":
    main()

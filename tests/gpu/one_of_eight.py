"""Rank 0 of 8 with torch's back end "fake", which sends nothing: memory at each stage beside the formula.

    python -m tests.gpu.one_of_eight

Values mean nothing here. Memory, what making the engine takes at most, and the host's time are those of a job
of eight.
"""

from __future__ import annotations

import argparse
import gc
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import dslaunch
from dslaunch.runtime.comm import mesh, process_group
from dslaunch.runtime.comm.rank_group import RankGroup
from dslaunch.runtime.engine import components
from dslaunch.runtime.placement.stage_policy import policy_for_stage
from tests.runtime.footprint import memory_bytes, optimizer_bytes_per_element

from .line import tell
from .model import GPT, SMALL, WIDE, Size, config, tokens

RANKS, STEPS = 8, 4


def main() -> None:
    """One line of JSON for each stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    torch.cuda.init()  # it names what is missing
    pretend()
    for stage in (1, 2, 3):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        tell(**measure(stage, SMALL if given.small else WIDE))


def pretend() -> None:
    """Be rank 0 of a group whose others agree with it in all they say."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    for module in (process_group, mesh, components):
        module.group_timeout = lambda: timedelta(minutes=1)  # type: ignore[attr-defined]
    process_group._sends_from_gpus = lambda: True
    components.watch = lambda *_, **__: None  # type: ignore[assignment]

    def same_of_all(_: RankGroup, value: object, *, what: str) -> list[Any]:
        return [value] * RANKS

    def same_numbers(_: RankGroup, value: torch.Tensor, *, what: str) -> torch.Tensor:
        return torch.stack([value] * RANKS)

    RankGroup.all_gather_objects = same_of_all  # type: ignore[method-assign]
    RankGroup.gather_objects = same_of_all  # type: ignore[method-assign, assignment]
    RankGroup.all_gather_float64 = same_numbers  # type: ignore[method-assign]


def measure(stage: int, size: Size) -> dict[str, Any]:
    """GiB between steps and by the formula, and the milliseconds that the host computes in a step."""
    model = GPT(size)
    numel = sum(param.numel() for param in model.parameters())
    engine, *_ = dslaunch.initialize(model=model, config=config(size, ranks=RANKS, stage=stage))
    peak_of_start = torch.cuda.max_memory_allocated()
    between = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    formula = memory_bytes(
        policy_for_stage(stage),
        numel=numel,
        param_bytes=2,
        grad_bytes=2 if stage == 1 else 4,
        optimizer_bytes=optimizer_bytes_per_element(num_states=2, param_bytes=2),
        num_shards=RANKS,
    )
    host_ms = []
    for number in range(STEPS):
        ids = tokens(size, number)
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.backward(engine(ids))
        engine.step()
        host_ms.append(round((time.perf_counter() - start) * 1e3, 1))
        torch.cuda.synchronize()
    found = {
        "name": f"rank 0 of {RANKS}, stage {stage}",
        "parameters": numel,
        "between_steps_GiB": between / 2**30,
        "formula_GiB": formula.total / 2**30,
        "peak_of_initialize_GiB": peak_of_start / 2**30,
        "peak_of_steps_GiB": torch.cuda.max_memory_allocated() / 2**30,
        "host_ms": host_ms[-1],
    }
    engine.destroy()
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}


if __name__ == "__main__":
    main()

"""Time of a step, tokens per second and peak memory of a GPT in bf16, with dslaunch and with its peers.

    python -m tests.gpu.speed torch fsdp2 dslaunch:0 dslaunch:2:cpu:super deepspeed:2:cpu

A word is a tool, its stage, and of offload: `cpu` (optimizer), `params`, `pageable` (not pinned), `super`,
`delayed`; `own` takes our kernels, `compile` compiles the model. Each has a process, and prints one line.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .checks import Check, run_checks
from .deepspeed_op import CPU_ADAM, FUSED_ADAM, import_deepspeed, is_compiled
from .line import tell
from .model import FIRST, GPT, MIDDLE, SMALL, Size, config, tokens

NUM_STEPS, NUM_WARM = 8, 3
SWITCH = "DSLAUNCH_CUDA_KERNELS"
SMALL_BUCKET = 100_000  # elements
PEERS = ("torch", "fsdp2", "deepspeed")
OFFLOADED_SHARE = 2.0  # the host takes longer
Step = Callable[[Tensor], Tensor]


def main() -> int:
    """Return how many of ours failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--small", action="store_true", help="a model of which only the working counts")
    given = parser.parse_args()
    return run_checks([check_of(kind, is_small=given.small) for kind in given.kinds])


def check_of(kind: str, *, is_small: bool) -> Check:
    """A few layers where all of them would be compiled."""
    tool, *words = kind.split(":")
    size = SMALL if is_small else MIDDLE if "compile" in words else FIRST
    share = OFFLOADED_SHARE if {"cpu", "params"} & {*words} else 1.0
    return Check(kind, partial(measure, kind, size), share=share, is_peers=tool in PEERS)


def measure(kind: str, size: Size) -> None:
    """Tell the milliseconds of a step, of which the host computes `host_ms`, and GiB at the peak."""
    if "own" in kind.split(":"):
        os.environ[SWITCH] = "1"
    step, optimizer = make(kind, size)
    times, host = [], []
    torch.cuda.reset_peak_memory_stats()
    for number in range(NUM_STEPS):
        ids = tokens(size, number)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(ids)
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    median = statistics.median(times[NUM_WARM:])
    tell(
        kind,
        step_ms=round(median * 1e3, 2),
        host_ms=round(statistics.median(host[NUM_WARM:]) * 1e3, 2),
        tokens_s=round(size.batch * size.sequence / median),
        peak_GiB=round(torch.cuda.max_memory_allocated() / 2**30, 3),
        reserved_GiB=round(torch.cuda.max_memory_reserved() / 2**30, 3),
        loss=round(float(loss.detach()), 4),
        optimizer=optimizer,
    )


def make(kind: str, size: Size) -> tuple[Step, str]:
    """Return the function that trains a step with this tool, and its optimizer."""
    torch.manual_seed(0)
    tool, *words = kind.split(":")
    model = GPT(size)
    if tool == "dslaunch":
        import dslaunch

        own = "our kernels" if "own" in words else "ours"
        return _with_engine(dslaunch, model, config(size, **zero_of(words)), compiles="compile" in words), own
    if tool == "deepspeed":
        return _with_deepspeed(model, size, words)
    if tool == "fsdp2":
        return _with_fsdp2(model), "torch's fused AdamW"
    if tool == "torch":
        return _with_torch(model), "torch's fused AdamW"
    raise ValueError(f"{kind}: give torch, fsdp2, dslaunch:STAGE or deepspeed:STAGE")


def zero_of(words: list[str]) -> dict[str, Any]:
    """The section zero_optimization."""
    zero: dict[str, Any] = {"stage": int(words[0])}
    host = {"device": "cpu", "pin_memory": "pageable" not in words}
    if "cpu" in words:
        zero["offload_optimizer"] = dict(host)
    if "params" in words:
        zero["offload_param"] = dict(host)
    if "super" in words:
        zero["offload_optimizer"]["super_offload"] = True
    if "delayed" in words:
        zero["offload_optimizer"]["delayed_update"] = {"enabled": True, "warmup_steps": 0}
    return zero


def _with_deepspeed(model: nn.Module, size: Size, words: list[str]) -> tuple[Step, str]:
    """With DeepSpeed's own optimizer if it is compiled."""
    zero = zero_of(words)
    if size == SMALL:  # else it has buffers of 500 million elements
        zero |= {"reduce_bucket_size": SMALL_BUCKET, "allgather_bucket_size": SMALL_BUCKET}
    given = config(size, **zero)
    library = import_deepspeed()
    optimizer = CPU_ADAM if "cpu" in words else FUSED_ADAM
    if not is_compiled(optimizer):
        optimizer = "torch's fused AdamW"
        given["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    library.init_distributed("nccl")
    return _with_engine(library, model, given), optimizer


def _with_engine(library: Any, model: nn.Module, given: dict[str, Any], *, compiles: bool = False) -> Step:
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=given)
    if compiles:
        engine.compile()

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _with_torch(model: nn.Module) -> Step:
    """By hand: 16-bit parameters, float32 masters, torch's fused AdamW."""
    masters = [param.detach().requires_grad_() for param in model.parameters()]
    model = model.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.1, fused=True)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids)
        loss.backward()
        for master, param in zip(masters, model.parameters(), strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        return loss

    return step


def _with_fsdp2(model: nn.Module) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("nccl")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]  # a ModuleList
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    sys.exit(main())

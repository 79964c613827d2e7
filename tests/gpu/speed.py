"""Time of a step, tokens per second and peak memory of a GPT in bf16, with dslaunch and with its peers.

    python -m tests.gpu.speed torch fsdp2 dslaunch:0 dslaunch:2:cpu:super deepspeed:2:cpu

A word is a tool, its stage, and of offload: `cpu` (optimizer), `params`, `pageable` (not pinned), `super`,
`delayed`; `own` takes our kernels, `compile` compiles the model. Each prints one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .model import FIRST, GPT, LARGE, SMALL, Size, config, tokens

NUM_STEPS, NUM_WARM = 8, 3
SWITCH = "DSLAUNCH_CUDA_KERNELS"
SMALL_BUCKET = 100_000  # elements
Step = Callable[[Tensor], Tensor]


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--small", action="store_true", help="a model of which only the working counts")
    parser.add_argument("--first", action="store_true", help="a model of half the layers")
    parser.add_argument("--profile", action="store_true", help="print what the last step spends its time on")
    given = parser.parse_args()
    for kind in given.kinds:
        try:
            size = SMALL if given.small else FIRST if given.first else LARGE
            with own_kernels() if "own" in kind.split(":") else nullcontext():
                found = measure(kind, size, profile=given.profile)
        except (
            RuntimeError,
            ImportError,
            NotImplementedError,
            AttributeError,
            TypeError,
            ValueError,
        ) as error:
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps({"name": kind, **found}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def own_kernels() -> Iterator[None]:
    """Engines that are made inside use our kernels."""
    os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        del os.environ[SWITCH]


def measure(kind: str, size: Size, *, profile: bool = False) -> dict[str, Any]:
    """Milliseconds of a step, of which the host computes `host_ms`; GiB at the peak."""
    step = make(kind, size)
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
    if profile:
        with torch.profiler.profile() as profiled:
            step(tokens(size, NUM_STEPS))
            torch.cuda.synchronize()
        print(profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=40))
    median = statistics.median(times[NUM_WARM:])
    return {
        "own_kernels": bool(os.environ.get(SWITCH)),
        "step_ms": round(median * 1e3, 2),
        "host_ms": round(statistics.median(host[NUM_WARM:]) * 1e3, 2),
        "tokens_s": round(size.batch * size.sequence / median),
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        "reserved_GiB": round(torch.cuda.max_memory_reserved() / 2**30, 3),
        "loss": round(float(loss.detach()), 4),
    }


def make(kind: str, size: Size) -> Step:
    """Return the function that trains a step with this tool."""
    torch.manual_seed(0)
    tool, *words = kind.split(":")
    with torch.device("cuda"):  # a processor takes half a minute to draw as many numbers
        model = GPT(size)
    if tool in ("dslaunch", "deepspeed"):
        return _with_engine(tool, model, size, words)
    if tool == "fsdp2":
        return _with_fsdp2(model)
    if tool == "torch":
        return _with_torch(model)
    raise ValueError(f"{kind}: give torch, fsdp2, dslaunch:STAGE or deepspeed:STAGE")


def _with_engine(tool: str, model: nn.Module, size: Size, words: list[str]) -> Step:
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
    if tool == "deepspeed" and size == SMALL:  # else it has buffers of 500 million elements
        zero |= {"reduce_bucket_size": SMALL_BUCKET, "allgather_bucket_size": SMALL_BUCKET}
    given = config(size, **zero)
    library: Any
    if tool == "dslaunch":
        import dslaunch as library
    else:
        import deepspeed as library

        given["optimizer"]["params"]["torch_adam"] = True
        if not torch.distributed.is_initialized():
            _join_alone()
        library.init_distributed("nccl")
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=given)
    if "compile" in words:
        engine.compile()

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _with_torch(model: nn.Module) -> Step:
    """By hand: 16-bit parameters, float32 masters, torch's fused AdamW."""
    masters = [param.detach().cuda().requires_grad_() for param in model.parameters()]
    model = model.cuda().bfloat16()
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

    if not torch.distributed.is_initialized():
        _join_alone()
        torch.distributed.init_process_group("nccl")
    model = model.cuda()
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


def _join_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


if __name__ == "__main__":
    main()

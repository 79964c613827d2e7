"""Works that bench_kernels.py measures: each is done by dslaunch and by others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.launch_peers import DEEPSPEED_FOLDER, why_no_deepspeed
from dslaunch import kernels

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
COUNTED = {"offset": 0, "lr": 1e-3, "weight_decay": 0.01}
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "step": 10}
MAX_NORM, LOSS_SCALE = 1.0, 1.0

Call = Callable[[], object]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The same work by several: `calls` by name, dslaunch's first.

    `num_bytes` is what has to move for each element.
    """

    name: str
    num_bytes: int
    calls: dict[str, Call]


# ---- each kernel, to be compared with a copy


def kernel_works(numel: int, num_threads: int) -> Iterator[Work]:
    """Yield one work for each kernel, in the dtypes of a bf16 model unless the name says otherwise."""

    def work(name: str, num_bytes: int, step: Callable[..., object], shard: object) -> Work:
        call = partial(step, (shard,), num_threads=num_threads)
        return Work(name=name, num_bytes=num_bytes, calls={"dslaunch": call})

    for name, num_bytes, grad, state, out in (
        ("AdamW, fp32 gradient", 28, FP32, FP32, None),
        ("AdamW", 28, BF16, FP32, BF16),
        ("AdamW, fp16 model", 28, FP16, FP32, FP16),
        ("AdamW, bf16 states", 20, BF16, BF16, BF16),
    ):
        yield work(name, num_bytes, kernels.adamw_step, _adam(_shard(numel, grad, out), numel, state))
    lion = kernels.LionShard(
        **_shard(numel, BF16, BF16),
        exp_avg=_zeros(numel),
        segments=(kernels.LionSegment(**COUNTED, numel=numel, beta1=0.9, beta2=0.99),),
    )
    yield work("Lion", 20, kernels.lion_step, lion)
    adagrad = kernels.AdagradShard(
        **_shard(numel, BF16, BF16),
        sum=_zeros(numel),
        segments=(kernels.AdagradSegment(**COUNTED, numel=numel, lr_decay=0.0, eps=1e-10, step=10),),
    )
    yield work("Adagrad", 20, kernels.adagrad_step, adagrad)
    of_sgd: dict[str, Any] = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "step": 10}
    sgd = kernels.SgdShard(
        **_shard(numel, BF16, BF16),
        momentum_buffer=_zeros(numel),
        segments=(kernels.SgdSegment(**COUNTED, **of_sgd, numel=numel),),
    )
    yield work("SGD, momentum", 20, kernels.sgd_step, sgd)
    lamb = kernels.LambShard(
        **_shard(numel, BF16, BF16),
        exp_avg=_zeros(numel),
        exp_avg_sq=_zeros(numel),
        update=_zeros(numel),
        segments=(kernels.LambSegment(**COUNTED, **ADAM, numel=numel),),
    )
    # 26 in the first pass: bf16 gradient, parameter, two moments twice, direction; 14 in the second
    yield work("LAMB, two passes", 40, kernels.lamb_step, lamb)
    for dtype, name, num_bytes in ((FP32, "fp32", 4), (BF16, "bf16", 2), (FP16, "fp16", 2)):
        call = partial(kernels.squared_norm, (torch.randn(numel).to(dtype),), num_threads)
        yield Work(name=f"norm, {name}", num_bytes=num_bytes, calls={"dslaunch": call})


# ---- beside others


def fp32_step(numel: int, num_threads: int, deepspeed_adam: Any) -> Work:
    """AdamW on float32: what every fused optimizer does in one pass."""
    shard = _adam(_shard(numel, FP32, None), numel)
    calls: dict[str, Call] = {
        "dslaunch": lambda: kernels.adamw_step((shard,), num_threads=num_threads),
        "torch fused": torch.optim.AdamW([_param(numel)], **HYPER, fused=True).step,
        "torch foreach": torch.optim.AdamW([_param(numel)], **HYPER, foreach=True).step,
    }
    if deepspeed_adam is not None:
        calls["DeepSpeed"] = deepspeed_adam([_param(numel)], **HYPER).step
    return Work(name="AdamW, fp32", num_bytes=28, calls=calls)


def bf16_step(numel: int, num_threads: int, deepspeed_adam: Any) -> Work:
    """The whole step of a bf16 model: norm, unscale, clip, update of a float32 master, cast."""
    arrays = _shard(numel, BF16, BF16)
    shard = _adam(arrays, numel)
    grads = [grad for _, grad in arrays["grads"]]

    def ours() -> None:
        norm = kernels.squared_norm(grads, num_threads) ** 0.5 / LOSS_SCALE
        scale = min(1.0, MAX_NORM / (norm + 1e-6)) / LOSS_SCALE
        kernels.adamw_step((shard,), grad_scale=scale, num_threads=num_threads)

    calls: dict[str, Call] = {"dslaunch": ours, "torch": _torch_passes(numel)}
    if deepspeed_adam is not None:
        calls["DeepSpeed"] = _deepspeed_passes(numel, deepspeed_adam)
    return Work(name="whole bf16 step", num_bytes=30, calls=calls)


def _torch_passes(numel: int) -> Call:
    master, model_param, grad = _param(numel), torch.empty(numel, dtype=BF16), torch.randn(numel).to(BF16)
    optimizer = torch.optim.AdamW([master], **HYPER, fused=True)

    def step() -> None:
        assert master.grad is not None
        master.grad.copy_(grad)
        master.grad.mul_(1 / LOSS_SCALE)
        torch.nn.utils.clip_grad_norm_([master], MAX_NORM)
        optimizer.step()
        model_param.copy_(master.detach())

    return step


def _deepspeed_passes(numel: int, deepspeed_adam: Any) -> Call:
    """Return the work of ZeRO stage 2 of DeepSpeed 0.19.8 with a CPU optimizer: copy, norm in float64,
    one factor, step, copy.
    """
    master, model_param, grad = _param(numel), torch.empty(numel, dtype=BF16), torch.randn(numel).to(BF16)
    optimizer = deepspeed_adam([master], **HYPER)

    def step() -> None:
        assert master.grad is not None
        master.grad.copy_(grad)
        norm = float(master.grad.double().norm(2)) / LOSS_SCALE
        master.grad.mul_(1.0 / (LOSS_SCALE * max(1.0, (norm + 1e-6) / MAX_NORM)))
        optimizer.step()
        model_param.copy_(master.detach())

    return step


def load_deepspeed_adam(build: Path) -> tuple[Any, str]:
    """Return DeepSpeedCPUAdam, compiled in `build`, or None and why there is none."""
    missing = why_no_deepspeed()
    if missing:
        return None, missing
    sys.path.append(str(DEEPSPEED_FOLDER))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(build))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # torch's loader waits for ever for the lock of a run that was stopped; no other program builds here
    (build / "cpu_adam" / "lock").unlink(missing_ok=True)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # at need: seconds, and it may be missing

        DeepSpeedCPUAdam([_param(1)])
    except Exception as error:  # any error of its build: the others are measured all the same
        return None, f"DeepSpeed's CPU Adam does not build here: {type(error).__name__}"
    return DeepSpeedCPUAdam, ""


# ---- tensors


def _zeros(numel: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


def _shard(numel: int, grad: torch.dtype, out: torch.dtype | None) -> dict[str, Any]:
    """The arrays that all optimizers have."""
    return {
        "param": torch.randn(numel),
        "grads": ((0, torch.randn(numel).to(grad)),),
        "param_out": None if out is None else torch.zeros(numel, dtype=out),
    }


def narrow_work(numel: int, num_threads: int) -> Work:
    """Return AdamW of a bf16 model with values of fewer bits, beside float32 in the same run."""

    def call(state: torch.dtype, param: torch.dtype = FP32) -> Call:
        arrays = _shard(numel, BF16, None if param is BF16 else BF16)
        arrays["param"] = arrays["param"].to(param)
        segment = kernels.AdamSegment(**COUNTED, **ADAM, numel=numel, seed=None if state is FP32 else 1)
        states = {"exp_avg": _zeros(numel, state), "exp_avg_sq": _zeros(numel, state)}
        scales = tuple(_zeros(-(-numel // 256)) for _ in states) if state is torch.uint8 else ()
        shard = kernels.AdamShard(**arrays, **states, scales=scales, segments=(segment,))
        return partial(kernels.adamw_step, (shard,), num_threads=num_threads)

    return Work(
        name="AdamW",
        num_bytes=28,
        calls={
            "float32 states and masters": call(FP32),
            "bf16 states": call(BF16),
            "bf16 states and masters": call(BF16, BF16),
            "8-bit states": call(torch.uint8),
            "8-bit states, bf16 masters": call(torch.uint8, BF16),
        },
    )


def _adam(arrays: dict[str, Any], numel: int, state: torch.dtype = FP32) -> kernels.AdamShard:
    segment = kernels.AdamSegment(**COUNTED, **ADAM, numel=numel)
    states = {"exp_avg": _zeros(numel, state), "exp_avg_sq": _zeros(numel, state)}
    return kernels.AdamShard(**arrays, **states, segments=(segment,))


def _param(numel: int) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    return param

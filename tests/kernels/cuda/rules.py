"""Optimizers that have a CUDA kernel, their programs, and how a test runs them on a device or the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from dslaunch.kernels import _C, Kernel
from dslaunch.kernels.cuda import lamb, lamb_step, step, steps
from dslaunch.kernels.cuda.arrays import CPU
from dslaunch.kernels.cuda.compiler import Program
from dslaunch.kernels.cuda.shards import GRAD_DTYPES, PARAM_OUT_DTYPES, STATE_DTYPES, Rule
from dslaunch.kernels.cuda.table import SMALL, TableSize, Variant
from tests.kernels.cuda.host_device import HostDevice
from tests.kernels.optimizers import LAMB, OPTIMIZERS, Optimizer

ELEMENTWISE = tuple(one for one in OPTIMIZERS if one not in LAMB)


def _modes(kernel: Kernel[Any]) -> tuple[int, ...]:
    """Those that the optimizers of the tests have segments of."""
    found = (
        _C.pack_segments(
            kernel.name, [one.segment], name="", shard_numel=0, lacking="", grad_scale=1.0, mode=one.mode
        )
        for one in OPTIMIZERS
        if one.kernel is kernel
    )
    return tuple(sorted({mode for ((_, _, _, mode, _),) in found}))


RULES = {rule.source: (rule, _modes(rule.kernel)) for rule in (Rule(kernel=one.kernel) for one in OPTIMIZERS)}
ALL_DTYPES = tuple(itertools.product(GRAD_DTYPES, STATE_DTYPES, (None, *PARAM_OUT_DTYPES)))
USUAL_DTYPES = ("bfloat16", "float32", "bfloat16")
FEW_DTYPES = (
    ("float32", "float32", None),
    USUAL_DTYPES,
    ("float16", "bfloat16", "float16"),
    ("bfloat16", "bfloat16", "float32"),
)


def programs(rule: Rule, mode: int, dtypes: tuple, size: TableSize = SMALL) -> list[Program]:  # type: ignore[type-arg]
    return [
        steps.program_of(rule, Variant(grad=grad, state=state, param_out=out, mode=mode), size)
        for grad, state, out in dtypes
    ]


def rule_of(optimizer: Optimizer, *, grad_scale: float = 1.0) -> Rule:
    """A step of this optimizer in this mode."""
    return Rule(kernel=optimizer.kernel, mode=optimizer.mode, grad_scale=grad_scale)


class Scratch:
    """What LAMB gets to work in: full of NaN, and kept to look at."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self.tensor = torch.zeros(0)

    def __call__(self, numel: int) -> torch.Tensor:
        self.tensor = torch.full((numel,), torch.nan, dtype=torch.float64, device=self._device)
        return self.tensor

    def sums(self, num_segments: int) -> list[tuple[float, float]]:
        """As `lamb_step` of the CPU returns them."""
        first, second = self.tensor[: 2 * num_segments].view(-1, 2).unbind(1)
        return list(zip(first.tolist(), second.tolist(), strict=True))


def run_on_host(
    host: HostDevice,
    optimizer: Optimizer,
    shards: Iterable[Any],
    *,
    grad_scale: float = 1.0,
    device_scale: Any = None,
    allocate: Any = None,
) -> None:
    rule = rule_of(optimizer, grad_scale=grad_scale)
    where: dict[str, Any] = {"stream": 0, "device": host, "device_types": (CPU,)}
    if optimizer in LAMB:
        where |= {"allocate": allocate or Scratch(), "bias_correction": optimizer.options["bias_correction"]}
        lamb.step(shards, rule, device_scale=device_scale, **where)
    else:
        steps.step(shards, rule, device_scale=device_scale, **where)


def run_on_device(optimizer: Optimizer, shards: Iterable[Any], **options: Any) -> None:
    """The public call."""
    if optimizer in LAMB:
        options.setdefault("allocate", Scratch("cuda"))
        lamb_step(shards, **optimizer.options, **options)
    else:
        step(optimizer.kernel, shards, mode=optimizer.mode, **options)

"""The optimizers that have a CUDA kernel, and how a test runs one on a device or on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dslaunch.kernels.cuda import adagrad_step, adamw_step, lamb, lamb_step, lion_step, sgd_step, steps
from dslaunch.kernels.cuda.arrays import CPU
from dslaunch.kernels.cuda.shards import Rule
from tests.kernels.cuda.host_device import HostDevice
from tests.kernels.optimizers import ADAGRAD, ADAM, LAMB, LION, SGD, Optimizer

CUDA_OPTIMIZERS = (*ADAM, LION, ADAGRAD, *SGD, *LAMB)
ELEMENTWISE = (*ADAM, LION, ADAGRAD, *SGD)
ON_DEVICE = {
    "adam": adamw_step,
    "lion": lion_step,
    "adagrad": adagrad_step,
    "sgd": sgd_step,
    "lamb": lamb_step,
}


def rule_of(optimizer: Optimizer, *, grad_scale: float = 1.0) -> Rule:
    """The rule that `dslaunch.kernels.cuda` has for this optimizer in this mode."""
    if optimizer in ADAM:
        return steps.adam_rule(grad_scale=grad_scale, **optimizer.options)
    if optimizer in LAMB:
        return steps.lamb_rule(grad_scale=grad_scale, **optimizer.options)
    if optimizer in SGD:
        return steps.sgd_rule(grad_scale=grad_scale)
    return (steps.lion_rule if optimizer is LION else steps.adagrad_rule)(grad_scale=grad_scale)


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
        lamb.step(shards, rule, device_scale=device_scale, allocate=allocate or Scratch(), **where)
    else:
        steps.step(shards, rule, device_scale=device_scale, **where)


def run_on_device(optimizer: Optimizer, shards: Iterable[Any], **options: Any) -> None:
    """The public call."""
    if optimizer in LAMB:
        options.setdefault("allocate", Scratch("cuda"))
    ON_DEVICE[rule_of(optimizer).source](shards, **optimizer.options, **options)

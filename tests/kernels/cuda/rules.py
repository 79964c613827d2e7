"""The optimizers that have a CUDA kernel, and how a test runs one on a device or on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dslaunch.kernels.cuda import adagrad_step, adamw_step, lion_step, sgd_step, steps
from dslaunch.kernels.cuda.arrays import CPU
from dslaunch.kernels.cuda.shards import Rule
from tests.kernels.cuda.host_device import HostDevice
from tests.kernels.optimizers import ADAGRAD, ADAM, LION, SGD, Optimizer

CUDA_OPTIMIZERS = (*ADAM, LION, ADAGRAD, *SGD)
ON_DEVICE = {"adam": adamw_step, "lion": lion_step, "adagrad": adagrad_step, "sgd": sgd_step}


def rule_of(optimizer: Optimizer, *, grad_scale: float = 1.0) -> Rule:
    """The rule that `dslaunch.kernels.cuda` has for this optimizer in this mode."""
    if optimizer in ADAM:
        return steps.adam_rule(grad_scale=grad_scale, **optimizer.options)
    if optimizer in SGD:
        return steps.sgd_rule(grad_scale=grad_scale)
    return (steps.lion_rule if optimizer is LION else steps.adagrad_rule)(grad_scale=grad_scale)


def run_on_host(
    host: HostDevice,
    optimizer: Optimizer,
    shards: Iterable[Any],
    *,
    grad_scale: float = 1.0,
    device_scale: Any = None,
) -> None:
    rule = rule_of(optimizer, grad_scale=grad_scale)
    steps.step(shards, rule, device_scale=device_scale, stream=0, device=host, device_types=(CPU,))


def run_on_device(optimizer: Optimizer, shards: Iterable[Any], **options: Any) -> None:
    """The public call."""
    ON_DEVICE[rule_of(optimizer).source](shards, **optimizer.options, **options)

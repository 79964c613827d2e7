"""One optimizer step on a device: read the arguments, plan, launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any

from .arrays import CUDA
from .compiler import Program
from .device import Device, cuda_device
from .shards import Fields, Hyper, Rule, read_shards
from .table import TableSize, Variant, plan_launches

KERNEL = "optimizer_step"
WITHOUT_OUT = "Nothing"
TYPE_NAMES = (("float32", "float"), ("bfloat16", "bfloat16"), ("float16", "float16"))


def step(
    shards: Iterable[Any],
    rule: Rule,
    *,
    device_scale: Any,
    stream: int,
    device: Device | None = None,
    device_types: Sequence[int] = (CUDA,),
) -> None:
    """Apply one step of `rule` to all shards; `device` is the one that they are on.

    Nothing is launched before all is checked and every kernel is compiled.
    """
    reading = read_shards(shards, rule, device_scale=device_scale, device_types=device_types)
    if not reading.runs:
        return
    on = device or cuda_device(reading.device or 0)
    launches = plan_launches(
        reading.runs,
        coefficient_bytes=rule.num_coefficients * ctypes.sizeof(ctypes.c_float),
        sizes=on.table_sizes,
        factor=reading.factor,
    )
    programs = [program_of(rule, launch.variant, launch.size) for launch in launches]
    for program in programs:
        on.prepare(program, KERNEL)
    for program, launch in zip(programs, launches, strict=True):
        num_blocks = min(launch.num_chunks, on.num_blocks)
        on.launch(program, KERNEL, [launch.table], num_blocks=num_blocks, stream=stream)


def program_of(rule: Rule, variant: Variant, size: TableSize) -> Program:
    """Return the program that updates arrays of these dtypes."""
    names = dict(TYPE_NAMES)
    return Program(
        source=rule.source,
        macros=(
            ("DSLAUNCH_GRAD", names[variant.grad]),
            ("DSLAUNCH_STATE", names[variant.state or "float32"]),
            ("DSLAUNCH_PARAM_OUT", names[variant.param_out] if variant.param_out else WITHOUT_OUT),
            ("DSLAUNCH_MODE", str(variant.mode)),
            *size.macros,
        ),
    )


def read_grad_scale(grad_scale: float) -> float:
    """Refuse a factor that would spoil every element."""
    if not math.isfinite(grad_scale):
        raise ValueError(f"grad_scale: {grad_scale:.15g}; must be finite")
    return grad_scale


# ---- one rule for each optimizer: its coefficients are worked out as in its header, in double -----------------


def adam_rule(*, grad_scale: float, adam_w_mode: bool) -> Rule:
    """Adam and AdamW; see kernels/adam.h."""

    def read_hyper(fields: Fields) -> Hyper:
        step = fields.step()
        lr, beta1, beta2 = fields.non_negative("lr"), fields.beta("beta1"), fields.beta("beta2")
        eps, weight_decay = fields.non_negative("eps"), fields.non_negative("weight_decay")
        return Hyper(
            coefficients=(
                grad_scale,
                beta1,
                1.0 - beta1,
                beta2,
                1.0 - beta2,
                lr / (1.0 - beta1**step),
                1.0 / math.sqrt(1.0 - beta2**step),
                eps,
                1.0 - lr * weight_decay if adam_w_mode else 1.0,
                0.0 if adam_w_mode else weight_decay,
            ),
            mode=int(adam_w_mode),
        )

    return Rule(
        source="adam",
        shard_kind="AdamShard",
        segment_kind="AdamSegment",
        states=("exp_avg", "exp_avg_sq"),
        read_hyper=read_hyper,
        num_coefficients=10,
    )


def lion_rule(*, grad_scale: float) -> Rule:
    """Lion; see kernels/lion.h."""

    def read_hyper(fields: Fields) -> Hyper:
        lr, beta1, beta2 = fields.non_negative("lr"), fields.beta("beta1"), fields.beta("beta2")
        weight_decay = fields.non_negative("weight_decay")
        return Hyper(
            coefficients=(grad_scale, beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr, 1.0 - lr * weight_decay)
        )

    return Rule(
        source="lion",
        shard_kind="LionShard",
        segment_kind="LionSegment",
        states=("exp_avg",),
        read_hyper=read_hyper,
        num_coefficients=7,
    )


def adagrad_rule(*, grad_scale: float) -> Rule:
    """Adagrad; see kernels/adagrad.h."""

    def read_hyper(fields: Fields) -> Hyper:
        step = fields.step()
        lr, lr_decay = fields.non_negative("lr"), fields.non_negative("lr_decay")
        eps, weight_decay = fields.non_negative("eps"), fields.non_negative("weight_decay")
        return Hyper(coefficients=(grad_scale, lr / (1.0 + (step - 1.0) * lr_decay), eps, weight_decay))

    return Rule(
        source="adagrad",
        shard_kind="AdagradShard",
        segment_kind="AdagradSegment",
        states=("sum",),
        read_hyper=read_hyper,
        num_coefficients=4,
    )


def sgd_rule(*, grad_scale: float) -> Rule:
    """SGD; see kernels/sgd.h."""

    def read_hyper(fields: Fields) -> Hyper:
        step = fields.step()
        lr, momentum = fields.non_negative("lr"), fields.non_negative("momentum")
        dampening, weight_decay = fields.finite("dampening"), fields.non_negative("weight_decay")
        nesterov = fields.boolean("nesterov")
        if nesterov and not (momentum > 0.0 and dampening == 0.0):
            raise ValueError(
                f"{fields.name}.nesterov: True, with momentum {momentum:.15g} and dampening {dampening:.15g}; needs "
                "momentum above 0 and dampening 0"
            )
        return Hyper(
            coefficients=(grad_scale, momentum, 1.0 - dampening if step > 1 else 1.0, lr, weight_decay),
            mode=0 if momentum == 0.0 else 2 if nesterov else 1,
            uses_states=momentum > 0.0,
        )

    return Rule(
        source="sgd",
        shard_kind="SgdShard",
        segment_kind="SgdSegment",
        states=("momentum_buffer",),
        read_hyper=read_hyper,
        num_coefficients=5,
        may_lack_states=True,
    )


def lamb_rule(*, grad_scale: float, eps_inside_sqrt: bool, bias_correction: bool) -> Rule:
    """LAMB's first pass; see kernels/lamb.h."""

    def read_hyper(fields: Fields) -> Hyper:
        step = fields.step()
        lr, beta1, beta2 = fields.non_negative("lr"), fields.beta("beta1"), fields.beta("beta2")
        eps, weight_decay = fields.non_negative("eps"), fields.non_negative("weight_decay")
        min_coeff, max_coeff = fields.non_negative("min_coeff"), fields.non_negative("max_coeff")
        if min_coeff > max_coeff:
            raise ValueError(
                f"{fields.name}.min_coeff: {min_coeff:.15g}; must not be above max_coeff, {max_coeff:.15g}"
            )
        correction = math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step) if bias_correction else 1.0
        return Hyper(
            coefficients=(grad_scale, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps, weight_decay),
            mode=int(eps_inside_sqrt),
            scales=(lr * correction, min_coeff, max_coeff),
        )

    return Rule(
        source="lamb",
        shard_kind="LambShard",
        segment_kind="LambSegment",
        states=("exp_avg", "exp_avg_sq"),
        read_hyper=read_hyper,
        num_coefficients=7,
        has_update=True,
    )

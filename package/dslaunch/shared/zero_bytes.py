"""Bytes that a rank holds and sends for the parameters of a model under ZeRO. Arithmetic only.

`dslaunch plan` rehearses a program instead; these are its bounds, and estimates where no program is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_FLOAT32, _BF16, _8_BITS = 4, 2, 1 + 1 / 64  # the last with its part of a scale
_BYTES = {"bf16": _BF16, "bfloat16": _BF16, "8bit": _8_BITS, "fp16": 2, "float16": 2}


class HeldBytes(NamedTuple):
    """Bytes of one rank between its steps, by kind; `on_host` is in host memory, all others on the device."""

    parameters: float
    gradients: float
    states: float
    on_host: float

    @property
    def on_device(self) -> float:
        """Return the sum of what is on the device."""
        return self.parameters + self.gradients + self.states


class TrainedBytes(NamedTuple):
    """Bytes that one trained parameter takes."""

    parameter: int
    states: float  # its master and what the optimizer remembers of it
    gradient_sum: int = _FLOAT32  # its gradient in a shard, where gradients are added up


def adam_bytes(number_bytes: int, config: Mapping[str, Any] | None = None) -> TrainedBytes:
    """Return the bytes of a parameter of `number_bytes` bytes that Adam trains.

    Its master and both moments are float32, unless the ds_config has another dtype for them.
    """
    bf16 = _section(config, "bf16") or _section(config, "bfloat16")
    names = _section(config, "data_types")

    def kept_bytes(deepspeeds: str, ours: str) -> float:
        return _BF16 if bf16.get(deepspeeds) is True else _bytes_of(names.get(ours))

    master = kept_bytes("bf16_master_weights_and_grads", "master_dtype")
    moment = kept_bytes("bf16_optimizer_states", "optimizer_state_dtype")
    sums = names.get("grad_accum_dtype")
    return TrainedBytes(
        parameter=number_bytes,
        states=2 * moment + (master if master > number_bytes else 0),
        gradient_sum=int(master if sums is None else _bytes_of(sums)),
    )


def _section(config: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    found = (config or {}).get(name)
    return found if isinstance(found, Mapping) else {}


def _bytes_of(dtype: object) -> float:
    return _BYTES.get(dtype.lower(), _FLOAT32) if isinstance(dtype, str) else _FLOAT32


def held_bytes(
    num_trained: float,
    num_frozen: float = 0,
    *,
    each: TrainedBytes,
    stage: int,
    num_ranks: int,
    has_optimizer_on_host: bool = False,
    has_parameters_on_host: bool = False,
) -> HeldBytes:
    """Return what a rank holds of a model whose parameters `num_ranks` ranks share. and train."""
    params = (num_trained + num_frozen) * each.parameter / (num_ranks if stage >= 3 else 1)
    is_cut = stage >= 2 and num_ranks > 1
    grads = num_trained * (each.gradient_sum / num_ranks if is_cut else each.parameter)
    states = num_trained * each.states / (num_ranks if stage >= 1 else 1)
    on_host = params if has_parameters_on_host else 0.0
    if has_optimizer_on_host:
        on_host += states + num_trained * each.gradient_sum / (num_ranks if stage >= 1 else 1)
    return HeldBytes(
        parameters=0.0 if has_parameters_on_host else params,
        gradients=0.0 if has_optimizer_on_host and stage >= 2 else grads,
        states=0.0 if has_optimizer_on_host else states,
        on_host=on_host,
    )


def sent_bytes(
    num_params: float,
    *,
    number_bytes: int,
    stage: int,
    num_ranks: int,
    num_micro_batches: int,
    is_pipeline: bool = False,
) -> float:
    """Return what a rank sends in one step for parameters that `num_ranks` ranks share."""
    times = 3 * num_micro_batches
    if is_pipeline or stage <= 1:
        times = 2
    elif stage == 2:
        times = num_micro_batches + 1
    return times * (num_ranks - 1) / num_ranks * num_params * number_bytes

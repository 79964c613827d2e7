"""Bytes that a rank holds and sends for the parameters of a model under ZeRO. Arithmetic only.

`dslaunch plan` rehearses a program instead; these are its bounds, and estimates where no program is there.
"""

from __future__ import annotations

from typing import NamedTuple

SHARD_GRADIENT_BYTES = 4  # shards of gradients are added up in float32
_MOMENTS_BYTES, _MASTER_BYTES = 8, 4


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


def adam_bytes(number_bytes: int) -> int:
    """Return the bytes of Adam's moments, and of the master of a 16-bit number, for one parameter."""
    return _MOMENTS_BYTES + (_MASTER_BYTES if number_bytes < 4 else 0)


def held_bytes(
    num_trained: float,
    num_frozen: float = 0,
    *,
    number_bytes: int,
    state_bytes: float,
    stage: int,
    num_ranks: int,
    has_optimizer_on_host: bool = False,
    has_parameters_on_host: bool = False,
) -> HeldBytes:
    """Return what a rank holds of a model whose parameters `num_ranks` ranks share.

    `number_bytes`: of a parameter; `state_bytes`: masters and optimizer states of a trained parameter
    """
    params = (num_trained + num_frozen) * number_bytes / (num_ranks if stage >= 3 else 1)
    is_cut = stage >= 2 and num_ranks > 1
    grads = num_trained * (SHARD_GRADIENT_BYTES / num_ranks if is_cut else number_bytes)
    states = num_trained * state_bytes / (num_ranks if stage >= 1 else 1)
    on_host = params if has_parameters_on_host else 0.0
    if has_optimizer_on_host:
        on_host += states + num_trained * SHARD_GRADIENT_BYTES / (num_ranks if stage >= 1 else 1)
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

"""Small state that a load takes over beside tensors of the model and the optimizer.

All of it can be taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy, deepcopy
from typing import Any

from torch import Tensor

from ..strided import is_strided
from .training_state import Training, restore_rng_state, rng_state

_log = logging.getLogger("dslaunch")


def take_rest(
    training: Training,
    saved: dict[str, Any],
    undo: ExitStack,
    *,
    with_module: bool,
    with_optimizer: bool,
    with_scheduler: bool,
    with_progress: bool,
) -> None:
    """Take the values of a checkpoint's training.pt; `undo` gets calls that take them back.

    Errors: whatever the module's, the scheduler's or the data loader's own methods raise
    """
    if with_optimizer:
        _take_groups(training, saved, undo)
    if with_module and saved["extra_state"]:
        own = {k: _copied(v) for k, v in training.beside_units().items() if not is_strided(v)}
        undo.callback(training.module.load_state_dict, own, strict=False)
        training.module.load_state_dict(saved["extra_state"], strict=False)
    scheduler = training.scheduler
    if with_scheduler and saved["scheduler"] is not None and hasattr(scheduler, "load_state_dict"):
        undo.callback(scheduler.load_state_dict, deepcopy(scheduler.state_dict()))
        scheduler.load_state_dict(saved["scheduler"])
    if with_progress:
        _take_progress(training, saved, undo)


def _copied(value: Any) -> Any:
    # torch cannot deepcopy() a sparse tensor in a compressed layout
    return value.clone() if isinstance(value, Tensor) else deepcopy(value)


def _take_groups(training: Training, saved: dict[str, Any], undo: ExitStack) -> None:
    if training.optimizer is None:
        return
    for group, hyper in zip(training.optimizer.param_groups, saved["optimizer"]["groups"], strict=True):
        undo.callback(_put_back, group, dict(group))
        group.update(hyper)
    if saved["loss_scale"] is not None:  # other precisions have none
        undo.callback(training.scaler.load_state_dict, training.scaler.state_dict())
        training.scaler.load_state_dict(saved["loss_scale"])


def _put_back(values: dict[str, Any], before: dict[str, Any]) -> None:
    values.clear()
    values.update(before)


def _take_progress(training: Training, saved: dict[str, Any], undo: ExitStack) -> None:
    progress, loader = training.progress, training.loader
    undo.callback(progress.become, copy(progress))
    progress.restore(
        saved["progress"], gradient_accumulation_steps=training.config.gradient_accumulation_steps
    )
    if loader is not None and saved["data"] is not None:
        undo.callback(loader.load_state_dict, loader.state_dict())
        loader.load_state_dict(saved["data"])
    undo.callback(restore_rng_state, rng_state())
    _take_rng(training, saved["rng"])


def _take_rng(training: Training, states: Sequence[dict[str, Any]]) -> None:
    job = training.job
    if len(states) == job.size:
        restore_rng_state(states[job.index])
    elif states and job.is_first:  # DeepSpeed's have none
        _log.warning(
            "the checkpoint was written by %d ranks and is read by %d: random numbers do not "
            "continue where they were",
            len(states),
            job.size,
        )

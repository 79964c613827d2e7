"""An engine's checkpoints, and the end of training that is saved.

Who saves or loads first loads torch.distributed.checkpoint: with what it needs, that takes as long as half of
torch itself, and many jobs end without.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ..checkpoint.preemption import EXIT_CODE, Preemption, last_words
from ..checkpoint.saver import Saver
from ..checkpoint.storage.url_store import open_store
from ..checkpoint.training_state import Progress, Training
from ..comm.collectives import Collectives
from ..config import Config
from ..data_loader import Loader
from ..step.flat_optimizer import FlatOptimizer
from ..step.loss_scale import LossScaler
from ..zero.sharded_model import ShardedModel
from .weights import Weights

_log = logging.getLogger("dslaunch")


class Checkpoints(Weights):
    """Any ZeRO stage, offload and number of ranks loads what any other has saved."""

    module: nn.Module
    settings: Config
    optimizer: FlatOptimizer | None
    lr_scheduler: Any
    training_dataloader: Any
    device: torch.device
    global_rank: int
    _model: ShardedModel
    _comm: Collectives
    _progress: Progress
    _scaler: LossScaler
    _saver: Saver
    _preemption: Preemption | None
    _max_restarts: int
    _num_waiting: int  # micro batches since the last optimizer step
    _has_begun_micro_batch: bool  # its backward was called, and its step() was not
    _forget_losses: Callable[[], None]

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write `save_dir`/`tag`, default global_step<n>, whole or not at all; returns True.

        See "One checkpoint" in checkpoint/format.py.

        `save_dir` is a folder that all ranks see, or a URL that fsspec opens. With `checkpoint.async_save`
        this returns when training may go on; a failure is then raised by the next step().
        Order:  every rank must call this
        Errors: CheckpointError if it cannot be written, or `client_state` holds other than
                plain data and tensors
        """
        begun_at = perf_counter()
        from ..checkpoint.save import SaveOptions, prepare  # here: see the top of this file

        name = f"global_step{self._progress.global_steps}" if tag is None else str(tag)
        options = SaveOptions(save_latest=save_latest, exclude_frozen_parameters=exclude_frozen_parameters)
        self._warn_of_gradients()
        self._saver.wait()
        prepared = prepare(self._training(), open_store(save_dir), name, client_state, options)
        self._saver.save(prepared, is_async=self.settings.checkpoint.async_save, begun_at=begun_at)
        return True

    def _warn_of_gradients(self) -> None:
        """No checkpoint has gradients."""
        if self._num_partial and self.global_rank == 0:
            steps = self.settings.gradient_accumulation_steps
            _log.warning(
                "save_checkpoint() after %d of %d micro batches of step %d: their gradients are not "
                "saved, and who loads it begins that step anew, with the data that follow; save after a "
                "step's last micro batch",
                self._num_partial,
                steps,
                self._progress.global_steps + 1,
            )

    @property
    def _num_partial(self) -> int:
        """Micro batches whose gradients wait for a step."""
        return self._num_waiting + self._has_begun_micro_batch

    def _start_afresh(self, step: int, *, with_progress: bool) -> None:
        """Forget the micro batches since the last step, `step` being the one that they were of: the load
        has dropped their gradients.
        """
        if self._num_partial and self.global_rank == 0:
            _log.warning(
                "load_checkpoint() after %d of %d micro batches of step %d: their gradients, which are of "
                "the state before, are dropped on all ranks, and the next micro batch begins a step; load "
                "after a step's last micro batch",
                self._num_partial,
                self.settings.gradient_accumulation_steps,
                step,
            )
        if not with_progress:  # else they are the checkpoint's
            self._progress.micro_steps -= self._num_waiting
        self._num_waiting, self._has_begun_micro_batch = 0, False
        self._forget_losses()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from `load_dir`/`tag`; returns its path and its client_state.

        Any stage and any number of ranks may have written it.

        Without a tag it is the one that `latest` names, or, if that is damaged, the newest one that is not,
        with a warning. Where the launcher starts a failed job again (--max_restarts), a folder without any
        checkpoint is no error: (None, {}). Nor is one without `latest` to programs written for DeepSpeed
        (`is_lenient`): (None, None), and a warning. Gradients of micro batches that wait for a step are
        dropped, with a warning: they are of the state before. `custom_load_fn(src=state_dict, dst=module)`
        takes the weights in place of the engine; every rank then has all of them.
        Order:  every rank must call this
        Errors: CheckpointError if there is none, or it does not fit the model
        """
        from ..checkpoint.load import LoadPlan, load_checkpoint  # here: see the top of this file

        plan = LoadPlan(
            strict=load_module_strict,
            with_optimizer=load_optimizer_states and not load_module_only,
            with_scheduler=load_lr_scheduler_states and not load_module_only,
            with_progress=not load_module_only,
            with_module=custom_load_fn is None,
            may_be_missing=self._max_restarts > 0,
            is_lenient=self.settings.origin.is_lenient,
        )
        step = self._progress.global_steps + 1
        self._saver.wait()

        def take_module(state: dict[str, Any]) -> None:
            self.load_module_state_dict({"module": state}, custom_load_fn=custom_load_fn)

        loaded = load_checkpoint(
            self._training(is_load=True),
            open_store(load_dir),
            None if tag is None else str(tag),
            plan,
            take_module=None if custom_load_fn is None else take_module,
        )
        if loaded is None:
            return None, None if plan.is_lenient else {}
        reader, saved = loaded
        self._start_afresh(step, with_progress=plan.with_progress)
        self._comm.recorder.step = self._progress.global_steps + 1
        return reader.where, saved["client_state"]

    def _training(self, *, is_load: bool = False) -> Training:
        self._model.offloaded.check_here("a checkpoint", is_load=is_load)
        self._model.before_gather()
        return Training(
            module=self.module,
            model=self._model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            progress=self._progress,
            loader=self.training_dataloader if isinstance(self.training_dataloader, Loader) else None,
            scaler=self._scaler,
            config=self.settings,
            comm=self._comm,
        )

    def _end_if_preempted(self) -> None:
        preemption = self._preemption
        if preemption is None or not preemption.is_agreed(self.device):
            return
        self.save_checkpoint(preemption.save_dir)
        self._saver.wait()
        preemption.close()
        if self.global_rank == 0:
            print(f"dslaunch: {last_words(preemption.save_dir)}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE)

"""Saving and loading of one engine's checkpoints, and the end of a training that was saved.

The first save or load imports torch.distributed.checkpoint: with its own imports that takes half as long as
torch itself, and many jobs never save.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ..checkpoint.preemption import CHANGE_CODE, Preemption, last_words
from ..checkpoint.saver import Saver
from ..checkpoint.storage.url_store import open_store
from ..checkpoint.training_state import Training
from ..comm.process_group import group_device
from ..tracing.spans import SPANS
from .accumulation import Accumulation

_log = logging.getLogger("dslaunch")


class Checkpoints:
    """Any ZeRO stage, offload and number of ranks loads what any other has saved."""

    def __init__(
        self,
        training: Callable[[bool], Training],
        *,
        saver: Saver,
        accumulation: Accumulation,
        preemption: Preemption | None,
        is_restarted: bool,
        forget_losses: Callable[[], None],
        state: Callable[[str], AbstractContextManager[object]],
    ) -> None:
        """`training(is_load)` returns the present contents for a checkpoint.

        `is_restarted`: the launcher starts a failed job again, so a folder without a checkpoint is no
        error. `state` returns a context for "saving" or "loading".
        """
        self._training, self._saver = training, saver
        self._accumulation, self._preemption = accumulation, preemption
        self._is_restarted = is_restarted
        self._forget_losses, self._state = forget_losses, state
        self._saved_in: str | None = None  # set once all ranks have agreed to end before the next forward

    def save(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """See `Engine.save_checkpoint`.

        Order: a collective
        """
        begun_at = perf_counter()
        with self._state("saving"):  # the import, too
            from ..checkpoint.save import SaveOptions, prepare  # imported at need: see the top of this file

            options = SaveOptions(
                save_latest=save_latest, exclude_frozen_parameters=exclude_frozen_parameters
            )
            self._saver.wait()
            training = self._training(False)
            self._warn_of_gradients(training)
            name = f"global_step{training.progress.global_steps}" if tag is None else str(tag)
            prepared = prepare(training, open_store(save_dir), name, client_state, options)
            self._saver.save(prepared, is_async=training.config.checkpoint.async_save, begun_at=begun_at)
        if SPANS.is_on:
            SPANS.add("checkpoint", f"save checkpoint {name}", int(begun_at * 1e9))
        if save_latest and not self._accumulation.num_partial:
            self._look_whether_to_end(str(save_dir))

    def _look_whether_to_end(self, save_dir: str) -> None:
        """Note whether any rank knows that the hosts are to change. The program may still finish its work
        after the save: all ranks end at their next forward.

        Order: a collective in a job whose hosts can change
        """
        preemption = self._preemption
        if preemption is not None and preemption.save_dir is None and self._saved_in is None:
            preemption.ask(group_device())
            self._saved_in = save_dir if preemption.agreed_code else None

    def end_if_saved(self) -> None:
        """End the program, if the ranks have agreed on it when they saved.

        Errors: SystemExit, once what was saved is durable; CheckpointError if that has failed
        """
        if self._saved_in is not None:
            self._end(self._saved_in, CHANGE_CODE)

    def load(
        self,
        load_dir: str | Path,
        tag: str | None,
        *,
        strict: bool,
        module_only: bool,
        with_optimizer: bool,
        with_scheduler: bool,
        take_module: Callable[[dict[str, Any]], None] | None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """See `Engine.load_checkpoint`. `take_module`, if any, loads the weights.

        Order: a collective
        """
        with self._state("loading"):  # the import, too
            from ..checkpoint.load import (
                LoadPlan,
                load_checkpoint,
            )  # imported at need: see the top of this file

            self._saver.wait()
            training = self._training(True)
            plan = LoadPlan(
                strict=strict,
                with_optimizer=with_optimizer and not module_only,
                with_scheduler=with_scheduler and not module_only,
                with_progress=not module_only,
                with_module=take_module is None,
                may_be_missing=self._is_restarted,
                is_lenient=training.config.origin.is_lenient,
            )
            step = training.progress.global_steps + 1
            with SPANS.span("checkpoint", "load checkpoint"):
                store, tag = open_store(load_dir), None if tag is None else str(tag)
                loaded = load_checkpoint(training, store, tag, plan, take_module=take_module)
        if loaded is None:
            return None, None if plan.is_lenient else {}
        self._start_afresh(training, step, with_progress=plan.with_progress)
        training.domains.wire.recorder.step = training.progress.global_steps + 1
        return loaded

    def end_if_preempted(self) -> None:
        """Save and end the program, if a rank was told to end before the norm of the step.

        Errors: SystemExit, after the save
        """
        preemption = self._preemption
        if preemption is not None and preemption.save_dir is not None and preemption.agreed_code:
            self.save(preemption.save_dir)
            self._end(preemption.save_dir, preemption.agreed_code)

    def _end(self, save_dir: str, code: int) -> None:
        self._saved_in = None
        self._saver.wait()
        if self._preemption is not None:
            self._preemption.close()
        if torch.distributed.get_rank() == 0:
            print(f"dslaunch: {last_words(save_dir, code)}", file=sys.stderr, flush=True)
        raise SystemExit(code)

    def close(self) -> None:
        """Stop listening: SIGTERM has its previous effect again.

        Errors: CheckpointError if a save beside training has failed
        """
        if self._preemption is not None:
            self._preemption.close()
        self._saver.close()

    def _warn_of_gradients(self, training: Training) -> None:
        """Warn if gradients wait for a step: checkpoints do not contain gradients."""
        if self._accumulation.num_partial and training.job.is_first:
            _log.warning(
                "save_checkpoint() after %d of %d micro batches of step %d: their gradients are not saved, "
                "and a program that loads it begins that step anew, with the data that follow; save after a "
                "step's last micro batch",
                self._accumulation.num_partial,
                self._accumulation.steps,
                training.progress.global_steps + 1,
            )

    def _start_afresh(self, training: Training, step: int, *, with_progress: bool) -> None:
        """Forget the micro batches since the last step, which belong to `step`: the load has dropped their
        gradients.
        """
        if self._accumulation.num_partial and training.job.is_first:
            _log.warning(
                "load_checkpoint() after %d of %d micro batches of step %d: their gradients, which are of "
                "the state before, are dropped on all ranks, and the next micro batch begins a step; load "
                "after a step's last micro batch",
                self._accumulation.num_partial,
                self._accumulation.steps,
                step,
            )
        num_ended = self._accumulation.forget()
        if not with_progress:  # else the counters are the checkpoint's
            training.progress.micro_steps -= num_ended
        self._forget_losses()

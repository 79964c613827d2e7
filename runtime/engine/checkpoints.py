"""Saving and loading of one engine's checkpoints, and the end of a training that was saved.

The first save or load imports torch.distributed.checkpoint: with its own imports that takes half as long as
torch itself, and many jobs never save.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.preemption import CHANGE_CODE, Preemption, last_words
from ..checkpoint.saver import Saver
from ..checkpoint.storage.url_store import open_store
from ..checkpoint.training_state import Training
from ..comm.process_group import group_device
from ..errors import CheckpointError
from ..tracing.spans import SPANS
from .accumulation import Accumulation

if TYPE_CHECKING:
    from ..checkpoint.load import LoadPlan, Names
    from ..checkpoint.pretrained.reader import Match
    from ..checkpoint.snapshots import Snapshots
    from ..checkpoint.storage.store import Store

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
        step: Callable[[], int],
        state: Callable[[str], AbstractContextManager[object]],
    ) -> None:
        """`training(is_load)` returns the present contents for a checkpoint.

        `is_restarted`: the launcher starts a failed job again, so a folder without a checkpoint is no
        error. `step` returns the number of optimizer steps, `state` a context for "saving" or "loading".
        """
        self._training, self._saver = training, saver
        self._accumulation, self._preemption = accumulation, preemption
        self._is_restarted = is_restarted
        self._forget_losses, self._step, self._state = forget_losses, step, state
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
            self._note_place(save_dir)
            if client_state and self._saver.snapshots is not None:
                self._saver.snapshots.has_given_state = True
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

            self._wait()
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
                loaded = self._snapshot_of(training, load_dir, plan)
                if loaded is None and tag is None:
                    loaded = self._newer_snapshot(training, load_dir, store, plan)
                if loaded is None:
                    loaded = load_checkpoint(training, store, tag, plan, take_module=take_module)
        if loaded is None:
            return None, None if plan.is_lenient else {}
        if loaded[1] and self._saver.snapshots is not None:
            self._saver.snapshots.has_given_state = True
        self._start_afresh(training, step, with_progress=plan.with_progress)
        return loaded

    def _snapshot_of(
        self, training: Training, folder: str | Path, plan: LoadPlan
    ) -> tuple[str, dict[str, Any]] | None:
        """Load the snapshot that this folder stands for; None if it is a folder like others.

        Order: a collective if it is
        """
        from ..checkpoint.resume import load_snapshot  # imported at need: see the top of this file
        from ..checkpoint.stand_in_folder import stands_for, write_rng_state

        snapshots = self._saver.snapshots
        tag = None if snapshots is None else stands_for(folder)
        if snapshots is None or tag is None:
            return None
        if load_snapshot(training, snapshots, tag, plan) == training.job.size:  # else nothing goes on there
            write_rng_state(folder, rank=training.job.index, world_size=training.job.size)
        return str(folder), {}

    def _newer_snapshot(
        self, training: Training, folder: str | Path, store: Store, plan: LoadPlan
    ) -> tuple[str, dict[str, Any]] | None:
        """In a job that has started again, load a snapshot in place of an older checkpoint, if the program
        loses nothing by it. A program for DeepSpeed may keep more beside its checkpoints than we know.

        Order: a collective
        """
        from ..checkpoint.resume import is_whole, resume  # imported at need: see the top of this file

        snapshots = self._saver.snapshots
        if snapshots is None or plan.is_lenient or not is_whole(plan):
            return None
        snapshots.may_be_loaded = True
        name = self._note_place(folder)
        if not snapshots.attempt:
            return None
        plan = replace(plan, may_be_missing=True)
        return resume(training, snapshots, store, plan, folder=name, is_asked=False)

    def _note_place(self, folder: str | Path) -> str:
        """Have snapshots name a folder that this training loads from or saves in; return its name. A trainer
        that says itself when its step has ended has named its own.
        """
        from ..checkpoint.snapshots import name_of_folder  # imported at need: see the top of this file

        snapshots = self._saver.snapshots
        if snapshots is None:
            return ""
        name = name_of_folder(folder)
        if not snapshots.is_held_back:
            snapshots.folders.add(name)
        return name

    def resume(
        self, folder: str | Path | None, client_state: Callable[[], Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        """See `Engine.resume`.

        Order: a collective
        """
        if client_state is not None and not callable(client_state):
            raise CheckpointError(
                f"client_state of resume() is {client_state!r:.80}; give it a function that returns a dict, "
                "which is called for each snapshot: resume(folder, client_state=lambda: {...})"
            )
        with self._state("loading"):  # the import, too
            from ..checkpoint.load import (
                LoadPlan,
                load_checkpoint,
            )  # imported at need: see the top of this file
            from ..checkpoint.resume import resume

            self._wait()
            snapshots = self._saver.snapshots
            if snapshots is not None:
                snapshots.state = client_state
                snapshots.is_resumed_from = True
            training = self._training(True)
            plan = LoadPlan(
                strict=True,
                with_optimizer=True,
                with_scheduler=True,
                with_progress=True,
                may_be_missing=True,
                is_lenient=training.config.origin.is_lenient,
            )
            step = training.progress.global_steps + 1
            store = None if folder is None else open_store(folder)
            loaded: tuple[str, dict[str, Any]] | None = None
            with SPANS.span("checkpoint", "load checkpoint"):
                if snapshots is not None:
                    name = "" if folder is None else self._note_place(folder)
                    loaded = resume(training, snapshots, store, plan, folder=name, is_asked=True)
                elif store is not None:
                    loaded = load_checkpoint(training, store, None, plan)
        if loaded is None:
            return {}
        self._start_afresh(training, step, with_progress=True)
        return loaded[1]

    def snapshot_if_due(self, *, is_asked: bool = False) -> None:
        """Begin a snapshot, if the step that has ended is one after which one is due. `is_asked`: a trainer
        says that its own step has ended, for which the engine waits.

        Order:  a collective if one is due
        Errors: as `Snapshots.take`
        """
        snapshots = self._saver.snapshots
        if snapshots is None or snapshots.is_held_back is not is_asked:
            return
        if self._is_to_leave(snapshots):
            self._leave(snapshots)
        elif snapshots.is_due(self._step()):
            with self._state("saving"):
                snapshots.take(self._training(False))

    def _is_to_leave(self, snapshots: Snapshots) -> bool:
        """Tell whether the ranks have agreed to go on with other hosts, and would go on from a snapshot."""
        preemption = self._preemption
        if preemption is None or preemption.agreed_code != CHANGE_CODE or preemption.is_by_disk:
            return False
        return self._saved_in is None and snapshots.is_counted_on

    def _leave(self, snapshots: Snapshots) -> None:
        """Put a snapshot into memory, and end the program once hosts that stay have all of it. If they get
        no copy of it, training goes on up to the next checkpoint.

        Order:  a collective
        Errors: SystemExit, on all ranks
        """
        with self._state("saving"):
            snapshots.take(self._training(False))
            if snapshots.is_copied_everywhere():
                self._end("the memory of the hosts", CHANGE_CODE)

    def _wait(self) -> None:
        """Wait for a save beside training, and for a snapshot. Errors: CheckpointError, on every rank"""
        self._saver.wait()
        if self._saver.snapshots is not None:
            self._saver.snapshots.wait()

    def load_weights(
        self, folder: str | Path, *, strict: bool, match_of: Callable[[Training, Names], Match]
    ) -> None:
        """See `Engine.load_weights`. `match_of` returns the way from names in files to the model's.

        Order: a collective
        """
        with self._state("loading"):  # the import, too
            from ..checkpoint.load_weights import load_weights  # imported at need: see the top of this file
            from ..checkpoint.opened import holds_checkpoints, is_checkpoint
            from ..checkpoint.pretrained.folder import is_pretrained

            self._wait()
            training = self._training(True)
            store: Store | None = None
            problem = ""
            try:
                store = open_store(folder)
            except CheckpointError as error:  # the other ranks wait below
                problem = str(error)
            holds_weights = store is not None and (
                is_pretrained(Path(folder)) or not (is_checkpoint(store) or holds_checkpoints(store))
            )
            found = training.job.all_gather_objects((problem, holds_weights), what="what the folder holds")
            problem = next((theirs for theirs, _ in found if theirs), "")
            if store is None or problem:
                raise CheckpointError(problem)
            path = Path(folder)
            if found[0][1]:  # rank 0 decides, so that all go the same way
                step = training.progress.global_steps + 1
                load_weights(training, path, partial(match_of, training), strict=strict)
                self._start_afresh(training, step, with_progress=False)
                return
        is_tag = is_checkpoint(store)
        self.load(
            path.parent if is_tag else folder,
            path.name if is_tag else None,
            strict=strict,
            module_only=True,
            with_optimizer=False,
            with_scheduler=False,
            take_module=None,
        )

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
        self._wait()
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
        training.domains.wire.recorder.step = training.progress.global_steps + 1
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

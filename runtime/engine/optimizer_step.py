"""One optimizer step: at the end of the micro batch that is a gradient accumulation boundary."""

from __future__ import annotations

import logging
from math import isfinite
from struct import pack
from zlib import crc32

from torch import Tensor

from ..activation import checkpointing
from ..checkpoint.preemption import Preemption
from ..checkpoint.saver import Saver
from ..checkpoint.training_state import Progress
from ..comm.order_check import OrderCheck
from ..comm.pending import Pending
from ..config import Config
from ..mesh.domain import Domains
from ..step.copied_gradients import CopiedGradients
from ..step.flat_optimizer import FlatOptimizer
from ..step.grad_norm import clip_factor, global_grad_norm
from ..step.loss_scale import LossScaler
from ..step.step_schedule import StepSchedule
from ..tensor.inputs import InputCheck
from ..zero.model.sharded_model import ShardedModel
from ..zero.units.sub_buffer import SubBuffer
from .hyper_parameters import HyperParameters
from .rerun import Rerun
from .roll_call import RollCall
from .skipped_steps import SkippedSteps

_log = logging.getLogger("dslaunch")


class OptimizerStep:
    """One step: average the gradients over all ranks, take their norm, clip, update this rank's shards,
    gather the parameters and set the gradients to zero. Infinite or NaN gradients change the counters only.
    """

    def __init__(  # noqa: PLR0913
        self,
        optimizer: FlatOptimizer,
        *,
        model: ShardedModel,
        domains: Domains,
        scaler: LossScaler,
        schedule: StepSchedule,
        saver: Saver,
        roll_call: RollCall,
        skipped: SkippedSteps,
        order_check: OrderCheck | None,
        inputs: InputCheck | None,
        preemption: Preemption | None,
        checks_order_each_step: bool,
    ) -> None:
        self.roll_call, self.skipped = roll_call, skipped
        self._optimizer, self._model, self._domains, self._scaler = optimizer, model, domains, scaler
        self._schedule, self._saver, self._order_check = schedule, saver, order_check
        self._checks_order_each_step, self._inputs = checks_order_each_step, inputs
        ends_at_steps = preemption is not None and (
            preemption.save_dir is not None or saver.snapshots is not None
        )
        self._preemption = preemption if ends_at_steps else None
        self._hyper_parameters = HyperParameters(optimizer, domains.job)
        self._copied = CopiedGradients(model.trained, domains)
        self._has_told_of_zero = False
        self.rerun: Rerun | None = None

    def run(self, config: Config, progress: Progress, *, num_samples: int) -> tuple[float, bool]:
        """Run the step, and count it and its `num_samples` in `progress`.

        Return the gradients' norm before clipping, and whether the step was applied.

        Order:  a collective
        Errors: ConfigError if the model or the optimizer's groups have changed so that training cannot follow
        """
        optimizer, model = self._optimizer, self._model
        self.roll_call.call()
        self._hyper_parameters.look()
        model.finish_gradients()
        self._saver.before_change()
        scale = self._scaler.scale  # the scale of the backwards: it changes between steps only
        norm = self._agree_on_norm()
        grad_norm = norm / scale
        is_finite = isfinite(grad_norm)
        if self.rerun is not None and (is_finite or not config.loss_scaling.enabled):
            self.rerun.look(grad_norm, progress.global_steps + 1)
        if is_finite:
            self._copied.check(norm)
        is_applied = is_finite or not config.checks_overflow
        optimizer.overflow, optimizer._global_grad_norm = not is_applied, grad_norm
        model.take_writes()
        self._schedule.finish()
        step = progress.global_steps + 1
        if grad_norm == 0.0:
            self._tell_of_zero(step)
        self.skipped.end_step(step, is_finite=is_finite, is_applied=is_applied, loss_scale=scale)
        if is_applied:
            max_norm = optimizer.clip_grad if is_finite else None
            self._update(clip_factor(grad_norm, max_norm=max_norm or 0.0) / scale)
        else:
            progress.skipped_steps += 1
        self.roll_call.freezing.end_step(is_applied=is_applied)
        model.end_step()
        progress.global_steps += 1
        progress.global_samples += num_samples
        if self._order_check is not None and self._checks_order_each_step:
            self._order_check.compare()
        self._domains.wire.recorder.step = progress.global_steps + 1
        checkpointing.warn_if_never_called(config.activation_checkpointing)
        return grad_norm, is_applied

    def _agree_on_norm(self) -> float:
        """Return the norm of all gradients, after a check that all ranks train and have averaged the same."""
        trained, check = self._model.trained, self._order_check
        note: list[float | Tensor] = [self._note]
        if check is not None:
            check.finish()
            note += [float(self._model.is_behind), *check.fingerprints]
        place = len(note)
        if self._preemption is not None:
            note.append(self._preemption.own_code)
        snapshots, place_of_vote = self._saver.snapshots, len(note)
        if snapshots is not None:
            note.append(snapshots.vote)
        if self._inputs is not None:
            note += self._inputs.notes
        norm, notes = global_grad_norm(trained, self._domains, device=self._model.device, note=note)
        said = [one[0] for one in notes]
        is_same = len(set(said)) == 1  # the values behind an equal note are equal, too
        self.roll_call.settle([self.roll_call.note] if is_same else said)
        self._hyper_parameters.settle([self._hyper_parameters.note] if is_same else said)
        if self._preemption is not None:
            self._preemption.settle([one[place] for one in notes])
        if snapshots is not None:
            snapshots.settle([one[place_of_vote] for one in notes])
        if self._inputs is not None:
            self._inputs.settle([one[-2:] for one in notes], self._domains.axes.lines(("tp",)))
        if check is not None:
            check.check([one[2 : 2 + check.num_fingerprints] for one in notes])
            if any(one[1] for one in notes):
                self._model.catch_up()
                norm, _ = global_grad_norm(trained, self._domains, device=self._model.device)
        return norm

    def _tell_of_zero(self, step: int) -> None:
        """Warn of a step without a backward: torch's optimizers would skip it, but here it updates
        parameters.
        """
        if not self._has_told_of_zero and self._domains.job.is_first:
            _log.warning(
                "step %d: all gradients are zero on all ranks, and momentum and weight decay move the "
                "parameters all the same; call engine.backward() before engine.step(). This is said once",
                step,
            )
        self._has_told_of_zero = True

    @property
    def _note(self) -> float:
        """Return this rank's note on the model, the groups and the hyper-parameters. It is one number,
        because each number that is sent costs a kernel launch on a GPU.
        """
        return float(crc32(pack("dd", self.roll_call.note, self._hyper_parameters.note)))

    def _update(self, grad_scale: float) -> None:
        update = self._optimizer.next_update(grad_scale)
        if self._schedule.begin(update):
            self._optimizer.num_steps = update.step
            return
        gathers: list[Pending] = []

        def start_unshard(sub_buffer: SubBuffer) -> None:  # called while the next shard is being updated
            gathers.append(self._model.publish(sub_buffer))

        self._optimizer.step(grad_scale=grad_scale, after_sub_buffer=start_unshard)
        for gather in gathers:
            gather.wait()

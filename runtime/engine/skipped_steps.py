"""Report of steps that are skipped because gradients are infinite or NaN, and of where in the model.

A skipped step is reported in one line, with facts that cost nothing in other steps. The norm shows that a
gradient is not finite; each rank then searches its part of the averages for the parameter. The rank that
caused it is known if its loss was not finite either. Otherwise the ranks look at their own gradients in the
following steps, until a step is applied.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.rank_group import Job
from ..config import Config
from ..errors import SkippedStepsError
from ..zero.units.partition import ROOT
from ..zero.units.sub_buffer import SubBuffer

_log = logging.getLogger("dslaunch")

EVERY = 100  # steps, after which the skipped ones among them are summed up if they were more than NUM_TOLD
NUM_TOLD = 10
_DEFAULT_LIMIT = {
    True: 1000,
    False: 100,
}  # whether the loss is scaled, which skips steps to find the scale -> limit


class _Bad(NamedTuple):
    """A parameter whose gradient is not finite; the greatest comes first in a backward."""

    place: int  # index of its sub-buffer among the trained ones
    member: int  # index in the sub-buffer
    label: str  # the sub-buffer's
    name: str


class SkippedSteps:
    """Skipped steps of one engine."""

    def __init__(self, config: Config, sub_buffers: Sequence[SubBuffer], job: Job) -> None:
        self._sub_buffers, self._job = tuple(sub_buffers), job
        limit = config.max_skipped_steps
        self._limit = _DEFAULT_LIMIT[config.loss_scaling.enabled] if limit is None else limit
        self._is_lenient = config.origin.is_lenient
        self._losses: list[Tensor | float] = []  # losses of this step's micro batches
        self._num_in_a_row = 0
        self._num_recent = 0  # number among the last EVERY steps

    def note_loss(self, loss: Tensor | float) -> None:
        """Note the loss of a micro batch."""
        self._losses.append(loss)

    def forget_losses(self) -> None:
        """Forget the losses of the micro batches since the last step."""
        self._losses.clear()

    def end_step(self, step: int, *, is_finite: bool, is_applied: bool, loss_scale: float) -> None:
        """Report a skipped step, while its gradients are still there.

        `step` counts from 1; one that is not finite may be applied all the same.

        Order: a collective if the step is told
        """
        self._num_in_a_row = 0 if is_applied else self._num_in_a_row + 1
        self._num_recent += not is_finite
        if not is_finite and self._num_recent <= NUM_TOLD:
            self._tell(step, is_applied=is_applied, loss_scale=loss_scale)
        if step % EVERY == 0:
            if self._num_recent > NUM_TOLD:
                self._say(
                    f"{self._num_recent} of the last {EVERY} steps had gradients that are infinite or NaN; "
                    f"{self._num_in_a_row} steps in a row have been skipped; loss scale {loss_scale:g}"
                )
            self._num_recent = 0
        for sub_buffer in self._sub_buffers:
            sub_buffer.gradients.watch_own(not is_finite)
        self._losses.clear()

    def check(self) -> None:
        """Check, after a step, that not too many in a row were skipped.

        Errors: SkippedStepsError if there were too many; only a warning in programs written for DeepSpeed
        """
        if self._limit == 0 or self._num_in_a_row < self._limit or self._num_in_a_row % self._limit:
            return
        text = (
            f"{self._num_in_a_row} steps in a row were skipped, because their gradients were infinite or "
            "NaN: nothing is trained; look at the loss, the learning rate and the data of the step before "
            "the first of them, or set max_skipped_steps (0: any number)"
        )
        if not self._is_lenient:
            raise SkippedStepsError(text)
        self._say(text)

    def _tell(self, step: int, *, is_applied: bool, loss_scale: float) -> None:
        own = (
            [
                _Bad(place, index, sub_buffer.label, sub_buffer.members[index].name)
                for place, sub_buffer in enumerate(self._sub_buffers)
                if (index := _last_bad(sub_buffer)) is not None
            ],
            not all(map(_is_finite, self._losses)),
            any(sub_buffer.gradients.was_own_bad for sub_buffer in self._sub_buffers),
        )
        everywhere = self._job.all_gather_objects(own, what="where gradients are not finite")
        bad, losses, gradients = zip(*everywhere, strict=True)
        what = "is applied, as bf16.check_grad_overflow is false" if is_applied else "is skipped"
        self._say(
            f"step {step} {what}: gradients are infinite or NaN, "
            f"{self._first(bad)}; {_who(losses, gradients)}; loss scale {loss_scale:g}"
        )

    def _first(self, everywhere: Sequence[Sequence[_Bad]]) -> str:
        """Return where the backward came first, which goes from the last unit to the first;
        the root is used anywhere.
        """
        of_models: dict[int, list[_Bad]] = {}
        for leader, bad in zip(self._job.leaders, everywhere, strict=True):
            of_models.setdefault(leader, []).extend(bad)
        # Of several models take the one with the last leader: if they are stages of a pipeline, the last
        # stage's backward comes first.
        leader, bad_params = max((item for item in of_models.items() if item[1]), default=(0, []))
        if not bad_params:
            return "as their norm is"  # all gradients are finite, but the sum of their squares is not
        num_units = len({one.place for one in bad_params})
        first = max([one for one in bad_params if one.label != f"unit '{ROOT}'"] or bad_params)
        others = f" of {num_units} units" if num_units > 1 else ""
        whose = f" of the model of rank {leader}" if len(of_models) > 1 else ""
        return f"first in {first.label}{others} (parameter '{first.name}'){whose}"

    def _say(self, text: str) -> None:
        if self._job.is_first:
            _log.warning("%s", text)


def _is_finite(loss: Tensor | float) -> bool:
    return bool(torch.isfinite(loss).all()) if isinstance(loss, Tensor) else math.isfinite(loss)


def _last_bad(sub_buffer: SubBuffer) -> int | None:
    """Return the index of the last member whose averages in this rank's part are not finite."""
    mesh = sub_buffer.mesh
    start, stop = sub_buffer.plan.own_run(mesh.chunk_index, num_chunks=mesh.sharers.size)
    shard_start, _ = sub_buffer.layout.shard_range(
        sub_buffer.plan.shard_index, num_shards=sub_buffer.plan.num_shards
    )
    last = -1
    for offset, piece in sub_buffer.gradients.pieces(start, stop):
        bad = torch.isfinite(piece).logical_not().nonzero()
        if len(bad):
            last = max(last, shard_start + offset + int(bad[-1]))
    sub_buffer.gradients.let_go()
    slots = enumerate(sub_buffer.layout.slots)
    return next((index for index, slot in slots if slot.offset <= last < slot.offset + slot.numel), None)


def _who(losses: Iterable[bool], gradients: Iterable[bool]) -> str:
    of_loss = [str(rank) for rank, is_bad in enumerate(losses) if is_bad]
    of_gradients = [str(rank) for rank, is_bad in enumerate(gradients) if is_bad]
    if of_loss:
        return f"the loss of {_ranks(of_loss)} was not finite"
    if of_gradients:
        return f"those of {_ranks(of_gradients)} were so before the average"
    return "every rank's loss was finite"


def _ranks(numbers: Sequence[str]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"

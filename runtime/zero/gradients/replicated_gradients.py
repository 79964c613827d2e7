"""Gradients of which each rank has all, in one flat buffer.

[Note: averages before the step]
Until the last backward of a step the buffer holds this rank's own sums, into which autograd adds. In that
backward the ranks average it in place, as soon as autograd has finished it. Nothing may touch it meanwhile,
so `p.grad` does not lead there then. What comes after that is for the ranks to average once more:

- Where the buffer holds all averages, autograd adds a later gradient to them, and a program may change them.
  The mean of "average + own part" over the ranks is the average plus the mean of the parts, so the whole is
  averaged again.
- Where a rank's shard alone holds an average, the rest of the buffer is nothing: `p.grad` is an
  AbsentGradient. The first later gradient has the shard put apart and the buffer set to zero; what the ranks
  make of the buffer is added to the shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from ...comm.collectives import Collectives
from ...errors import ConfigError
from ..parameters.flat_buffer import FlatBuffer
from .absent_gradient import WHY_ABSENT, AbsentGradient
from .gradients import FlatGradients


class Content(Enum):
    """Contents of the flat buffer; each state costs the buffer's memory only."""

    SUMS = "this rank's own sums"
    SENT = "what the ranks are averaging"
    SHARD = "the average in this rank's shard"
    AVERAGES = "all averages"


class ReplicatedGradients(FlatGradients):
    """`p.grad` is a view of the flat buffer where that holds sums or averages of use; None, which the user
    may set, means zero.
    """

    def __init__(
        self, names: Sequence[str], params: Sequence[nn.Parameter], whole: FlatBuffer, *, shard: Tensor
    ) -> None:
        super().__init__(names, params, whole)
        self._shard = shard
        self._content = Content.SUMS
        self._apart: Tensor | None = None  # [shard] the average, while the buffer holds later gradients
        self._version = 0  # version of the buffer that holds all averages, as the ranks made it
        # Stand-ins for `p.grad` where it does not lead to the buffer, made when first needed. Where all ranks
        # have all averages that is in a backward only, and None is cheaper.
        self._absent: list[AbsentGradient | None] | None = None
        if shard.numel() == whole.flat.numel():
            self.hide_as_none()
        self.is_averaged = False  # the ranks have begun to average it in this step
        self.was_dropped = False  # set to zero after that
        self.adopt()

    @property
    def unaveraged(self) -> Tensor | None:
        """All gradients, until the last backward of a step."""
        return self.flat if self._content is Content.SUMS else None

    @property
    def shard(self) -> Tensor:
        return self._shard

    def held(self) -> tuple[Tensor, ...]:
        tensors = [one for one in super().held() if not isinstance(one, AbsentGradient)]
        return tuple(tensors if self._apart is None else [*tensors, self._apart])

    def hide_as_none(self) -> None:
        """Let `p.grad` be None where it would be an AbsentGradient."""
        self._absent = [None] * len(self._params)

    # ---- while a backward goes on

    def pop_late(self, index: int) -> Tensor | None:
        """Return what autograd has made for the parameter at `index` where it could not add it to the
        buffer, else None.
        """
        if self._content not in (Content.SENT, Content.SHARD) or not self._is_here:
            return None
        param, absent = self._params[index], self._absences[index]
        grad = param.grad
        if grad is absent:
            return None if absent is None else absent.take_added()
        param.grad = absent  # a backward that makes a graph, or one that found None
        return grad

    @torch.no_grad()
    def add_late(self, index: int, grad: Tensor) -> None:
        """Add a late gradient to the buffer; no collective is under way."""
        if self._content is Content.SHARD:
            self._put_apart()
        self._whole.views[index].add_(grad.to_dense() if grad.is_sparse else grad)

    def hand_in(self, index: int) -> None:
        """Take the finished gradient of the parameter at `index` in the last backward of a step."""
        self._arrived.add(index)

    @torch.no_grad()
    def complete(self) -> None:
        """Give the buffer to the ranks, which average it until `keep`."""
        self.adopt()
        if self._content is Content.SUMS:
            self.look_at_own()
        elif self._content is Content.SHARD:
            self._put_apart()
        for param, absent in zip(self._params, self._absences, strict=True):
            param.grad = absent
        self._content = Content.SENT
        self.is_averaged = True

    @torch.no_grad()
    def keep(self) -> None:
        self._content = Content.SHARD
        if self._apart is not None:
            self._shard.add_(self._apart)
            self._apart = None
        if self._shard.numel() == self.flat.numel():
            self.note_gathered()

    def note_gathered(self) -> None:
        """Note that the buffer holds all averages."""
        self._content = Content.AVERAGES
        self._show()
        self._version = self.flat._version

    @property
    def is_late(self) -> bool:
        """True if gradients came, or the program changed some, after the ranks had averaged them."""
        if self._content is Content.AVERAGES:
            return self.was_dropped or self.flat._version != self._version
        return self._apart is not None

    def end_step(self) -> None:
        """Note that the averages have been used and set to zero."""
        self._content = Content.SUMS
        self.is_averaged = self.was_dropped = False
        self._arrived.clear()

    @property
    def _absences(self) -> list[AbsentGradient | None]:
        if self._absent is None:
            self._absent = [
                AbsentGradient(name, view) for name, view in zip(self._names, self._whole.views, strict=True)
            ]
        return self._absent

    def _put_apart(self) -> None:
        if self._apart is None:
            self._apart = self._shard.clone()
            self.flat.zero_()

    def _show(self) -> None:
        for index, (param, absent) in enumerate(zip(self._params, self._absences, strict=True)):
            if param.grad is absent:
                param.grad = self._shown(index)

    # ---- between backwards

    @torch.no_grad()
    def adopt(self) -> None:
        """Make every `p.grad` the view again: autograd replaces it under `create_graph`, users may too.

        Errors: ConfigError for what was set where `p.grad` is absent
        """
        if self._content is Content.SHARD:
            self._refuse_what_was_set()
        elif self._content is not Content.SENT:
            self._take_what_was_set()

    def _take_what_was_set(self) -> None:
        for param, view in zip(self._params, self._whole.views, strict=True):
            if param.grad is view:
                continue
            if param.grad is None:
                view.zero_()
            else:
                view.copy_(param.grad)
            param.grad = view

    def _refuse_what_was_set(self) -> None:
        for name, param, absent in zip(self._names, self._params, self._absences, strict=True):
            if param.grad is not absent:
                what = "set to None" if param.grad is None else "replaced"
                raise ConfigError(
                    f"p.grad of '{name}' was {what} {WHY_ABSENT}; engine.zero_grad() on all ranks drops it"
                )

    def averages(self, indices: Sequence[int], comm: Collectives) -> list[Tensor]:
        label = self._label(indices[0])
        if self._content is not Content.SUMS:
            whole = comm.gather_states(self._shard, what=label)
        else:
            self.adopt()
            whole = self.flat.clone()
            comm.reduce_scatter_or_all_reduce(whole, what=label).wait()
            comm.forget_buffers()
            comm.all_gather_(whole, what=label).wait()
        return [self._cut(whole, index) for index in indices]

    def replace(self, index: int, value: Tensor) -> None:
        self.adopt()
        if self._content is Content.SHARD:
            self._replace_in_shard(index, value.reshape(-1))
            return
        is_late = self.is_late
        self._whole.views[index].copy_(value)
        if not is_late:  # the ranks agree on it
            self._version = self.flat._version

    def _replace_in_shard(self, index: int, value: Tensor) -> None:
        slot, numel = self._whole.layout.slots[index], self._shard.numel()
        first = self._shard.storage_offset() - self.flat.storage_offset()
        start, stop = max(slot.offset, first), min(slot.offset + slot.numel, first + numel)
        own = self._shard
        if self._apart is not None:
            self._whole.views[index].zero_()
            own = self._apart
        if start < stop:
            own[start - first : stop - first].copy_(value[start - slot.offset : stop - slot.offset])

    def replace_own(self, index: int, value: Tensor) -> None:
        raise ConfigError(
            f"the gradient of '{self._names[index]}' is whole on every rank at this ZeRO stage; use "
            "safe_set_full_grad()"
        )

    def take_off(self) -> Sequence[Tensor]:
        self.adopt()
        for param in self._params:
            param.grad = None
        self._is_here = False
        return (self.flat,) if self._apart is None else (self.flat, self._apart)

    def put_on(self) -> None:
        self._is_here = True
        for index, param in enumerate(self._params):
            grad = param.grad
            param.grad = self._shown(index)
            if grad is not None:
                self.add_late(index, grad)

    def _shown(self, index: int) -> Tensor | None:
        """Return the value of `p.grad` between backwards."""
        return self._absences[index] if self._content is Content.SHARD else self._whole.views[index]

    def zero(self) -> None:
        self._check_here()
        if self._content is not Content.SUMS:
            self._content, self._apart, self.was_dropped = Content.AVERAGES, None, True
        for index, (param, view) in enumerate(zip(self._params, self._whole.views, strict=True)):
            if param.grad is not view:
                param.grad = self._shown(index)
        self.flat.zero_()

    def release(self) -> None:
        self._apart = None
        super().release()


class AccumulatedGradients(ReplicatedGradients):
    """`p.grad` is None outside a backward; the sum over micro batches,
    and what the ranks average, is float32.
    """

    def __init__(
        self, names: Sequence[str], params: Sequence[nn.Parameter], whole: FlatBuffer, *, shard: Tensor
    ) -> None:
        super().__init__(names, params, whole, shard=shard)
        self.hide_as_none()
        # `pop_late` finds a gradient that cannot be added at once.
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, param in enumerate(params)
        ]

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        reference = weakref.ref(self)  # torch holds hooks where the garbage collector does not look

        def take(_: Tensor) -> None:
            gradients = reference()
            if gradients is not None:
                gradients._take(index)

        return take

    def _take(self, index: int) -> None:
        param = self._params[index]
        if param.grad is not None and self._content is not Content.SENT:
            grad, param.grad = param.grad, None
            self.add_late(index, grad)

    def adopt(self) -> None:
        """Add the gradients that the user set."""
        for index in range(len(self._params)):
            self._take(index)

    def _shown(self, index: int) -> None:
        """Return None, whatever the buffer holds."""

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().release()

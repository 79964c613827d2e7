"""The gradients of one sub-buffer: where autograd leaves them, and what is kept of them between backwards.

A rank that is alone has what autograd makes, and no copy of it. Replicated gradients are one flat buffer for good, into
whose views autograd adds; where their sum is to be float32 and they are not, each is handed in and added. Sharded ones have a flat buffer only while a backward fills it: each parameter's gradient is
handed in when autograd has finished it, and when the ranks have averaged the whole, each keeps its own shard and adds to
it from one micro batch to the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm.collectives import Collectives
from ..errors import ConfigError
from ..offload.copies import Arrival
from ..offload.offload import PartHome
from .buffer import FlatBuffer
from .layout import FlatLayout
from .policy import Placement
from .precision import Precision


class Gradients(ABC):
    """Of the parameters in `params`, in the order of the layout's slots."""

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter]) -> None:
        self._names, self._params = tuple(names), tuple(params)
        self._is_here = True

    @abstractmethod
    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """This rank's part of the average, from `start` to `stop` in its shard: 1-D tensors in order, and where each begins."""

    @abstractmethod
    def adopt(self) -> None:
        """Take over what the user did to `p.grad` since the last call.

        Errors: ConfigError if that has no meaning
        """

    @abstractmethod
    def averages(self, places: Sequence[int], comm: Collectives) -> list[Tensor]:
        """Float32 copies of the ranks' averages for the parameters at these places, of their shapes.

        Order: a collective, one for all of them
        """

    @abstractmethod
    def replace(self, place: int, value: Tensor) -> None:
        """Let that be the average; every rank gives the same."""

    @abstractmethod
    def replace_own(self, place: int, value: Tensor) -> None:
        """Let that be the average of what this rank's shard holds of the parameter, 1-D.

        Errors: ConfigError where the shard is no more this rank's than another's
        """

    @abstractmethod
    def take_off(self) -> Sequence[Tensor]:
        """What holds the gradients between steps; no `p.grad` leads there until `put_on`, so its memory may go."""

    @abstractmethod
    def put_on(self) -> None:
        """Undo that. What autograd made of parameters meanwhile is added."""

    def _check_here(self) -> None:
        if not self._is_here:
            raise ConfigError(
                f"the gradient of '{self._names[0]}' is in host memory, where engine.offload_states() has put it; call "
                "engine.reload_states() first"
            )

    @abstractmethod
    def zero(self) -> None:
        """Set every gradient to zero."""

    def release(self) -> None:
        """Let the parameters go."""
        for param in self._params:
            param.grad = None


class OwnGradients(Gradients):
    """`p.grad` is autograd's own, and None between steps; None, which the user may set, means zero."""

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter], layout: FlatLayout) -> None:
        super().__init__(names, params)
        self._slots = layout.slots
        # Places by offset: slots are laid out by optimizer group, and named in the model's order.
        self._order = sorted(range(len(self._slots)), key=lambda place: self._slots[place].offset)
        self._taken_off: list[Tensor | None] = []  # by place

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        for place in self._order:
            param, slot = self._params[place], self._slots[place]
            grad = torch.zeros_like(param) if param.grad is None else param.grad.detach()
            yield slot.offset, (grad.to_dense() if grad.is_sparse else grad).reshape(-1)

    def averages(self, places: Sequence[int], comm: Collectives) -> list[Tensor]:
        return [self._average(self._params[place]) for place in places]

    def _average(self, param: nn.Parameter) -> Tensor:
        grad = torch.zeros_like(param) if param.grad is None else param.grad.detach()
        return grad.to_dense().float() if grad.is_sparse else grad.to(torch.float32, copy=True)

    def replace(self, place: int, value: Tensor) -> None:
        param = self._params[place]
        param.grad = value.to(param.dtype, copy=True)

    def replace_own(self, place: int, value: Tensor) -> None:
        self.replace(place, value.view(self._params[place].shape))

    def take_off(self) -> Sequence[Tensor]:
        # Copies, because others may hold the memory of a gradient that autograd or the user made.
        self._taken_off = [None if param.grad is None else param.grad.clone() for param in self._params]
        self.release()
        self._is_here = False
        return [grad for grad in self._taken_off if grad is not None and not grad.is_sparse]

    def put_on(self) -> None:
        for param, grad in zip(self._params, self._taken_off, strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else grad + param.grad
        self._taken_off, self._is_here = [], True

    def adopt(self) -> None:
        """Whatever is there counts."""

    def zero(self) -> None:
        self._check_here()
        self.release()


class FlatGradients(Gradients):
    """The ranks average one flat buffer."""

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter], whole: FlatBuffer) -> None:
        super().__init__(names, params)
        self._whole = whole

    @property
    def flat(self) -> Tensor:
        """[numel] What the ranks average in place."""
        return self._whole.flat

    @property
    @abstractmethod
    def shard(self) -> Tensor:
        """[shard] This rank's part of the average."""

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        yield start, self.shard[start:stop]

    def _label(self, place: int) -> str:
        return f"the gradient of '{self._names[place]}'"

    def _cut(self, whole: Tensor, place: int) -> Tensor:
        slot = self._whole.layout.slots[place]
        return whole[slot.offset : slot.offset + slot.numel].view(slot.shape).to(torch.float32, copy=True)

    @abstractmethod
    def keep(self) -> None:
        """The ranks have averaged `flat`."""


class ReplicatedGradients(FlatGradients):
    """`p.grad` is a view of the flat buffer; None, which the user may set, means zero."""

    def __init__(
        self, names: Sequence[str], params: Sequence[nn.Parameter], whole: FlatBuffer, *, shard: Tensor
    ) -> None:
        super().__init__(names, params, whole)
        self._shard = shard
        self.adopt()

    @property
    def shard(self) -> Tensor:
        return self._shard

    def adopt(self) -> None:
        """Make every `p.grad` the view again: autograd replaces it under `create_graph`, users may too."""
        for param, view in zip(self._params, self._whole.views, strict=True):
            if param.grad is view:
                continue
            if param.grad is None:
                view.zero_()
            else:
                view.copy_(param.grad)
            param.grad = view

    def averages(self, places: Sequence[int], comm: Collectives) -> list[Tensor]:
        self.adopt()
        whole = self.flat.clone()
        comm.reduce(whole, what=self._label(places[0])).wait()
        comm.gather(whole, what=self._label(places[0])).wait()
        return [self._cut(whole, place) for place in places]

    def replace(self, place: int, value: Tensor) -> None:
        self.adopt()
        self._whole.views[place].copy_(value)

    def replace_own(self, place: int, value: Tensor) -> None:
        raise ConfigError(
            f"the gradient of '{self._names[place]}' is whole on every rank at this ZeRO stage; use safe_set_full_grad()"
        )

    def take_off(self) -> Sequence[Tensor]:
        self.adopt()
        self.release()
        self._is_here = False
        return (self.flat,)

    def put_on(self) -> None:
        for param, view in zip(self._params, self._whole.views, strict=True):
            if param.grad is not None:
                view.add_(param.grad)
            param.grad = view
        self._is_here = True

    def keep(self) -> None:
        """It lies in the shard already."""

    def zero(self) -> None:
        self._check_here()
        for param, view in zip(self._params, self._whole.views, strict=True):
            if param.grad is not view:
                param.grad = view
        self.flat.zero_()


class AccumulatedGradients(ReplicatedGradients):
    """`p.grad` is None outside a backward; the sum over micro batches, and what the ranks average, is float32."""

    def __init__(
        self, names: Sequence[str], params: Sequence[nn.Parameter], whole: FlatBuffer, *, shard: Tensor
    ) -> None:
        super().__init__(names, params, whole, shard=shard)
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(self._take, view))  # type: ignore[no-untyped-call]
            for param, view in zip(params, whole.views, strict=True)
        ]

    @staticmethod
    @torch.no_grad()
    def _take(view: Tensor, param: Tensor) -> None:
        if param.grad is not None:
            view.add_(param.grad.to_dense() if param.grad.is_sparse else param.grad)
            param.grad = None

    def adopt(self) -> None:
        """Add what the user set."""
        for param, view in zip(self._params, self._whole.views, strict=True):
            self._take(view, param)

    def zero(self) -> None:
        for param in self._params:
            param.grad = None
        self.flat.zero_()

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().release()


class SumPlace(NamedTuple):
    """What a shard of gradients is added up in."""

    dtype: torch.dtype
    device: torch.device
    pin_memory: bool


class ShardedGradients(FlatGradients):
    """`p.grad` is None outside a backward. The shard is float32, unless said otherwise, as it costs 1/N."""

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        whole: FlatBuffer,
        *,
        sums: SumPlace,
        index: int,
        num_shards: int,
    ) -> None:
        super().__init__(names, params, whole)
        self._start, self._stop = whole.layout.shard_range(index, num_shards=num_shards)
        self._sums = sums
        self._shard = self._make_shard()
        self._is_zero = True
        self._is_allocated = False
        self._arrived: set[int] = set()  # places of parameters
        self._gaps = whole.layout.gaps()
        whole.free()

    def _make_shard(self) -> Tensor:
        where = self._sums
        numel = self._stop - self._start
        return torch.zeros(numel, dtype=where.dtype, device=where.device, pin_memory=where.pin_memory)

    @property
    def shard(self) -> Tensor:
        return self._shard

    def averages(self, places: Sequence[int], comm: Collectives) -> list[Tensor]:
        whole = comm.gather_states(self.shard.to(self.flat.device), what=self._label(places[0]))
        return [self._cut(whole, place) for place in places]

    def replace(self, place: int, value: Tensor) -> None:
        slot = self._whole.layout.slots[place]
        start, stop = max(slot.offset, self._start), min(slot.offset + slot.numel, self._stop)
        if start < stop:
            self.replace_own(place, value.reshape(-1)[start - slot.offset : stop - slot.offset])

    def replace_own(self, place: int, value: Tensor) -> None:
        slot = self._whole.layout.slots[place]
        start = max(slot.offset, self._start) - self._start
        self.shard[start : start + value.numel()].copy_(value.reshape(-1))
        self._is_zero = False

    def take_off(self) -> Sequence[Tensor]:
        self._is_here = False
        return (self.shard,)

    def put_on(self) -> None:
        self._is_here = True

    @property
    def is_complete(self) -> bool:
        """Whether autograd has finished every parameter's gradient in this backward."""
        return len(self._arrived) == len(self._params)

    @torch.no_grad()
    def hand_in(self, place: int) -> None:
        """Autograd has finished the gradient of the parameter at `place`; reentrant checkpointing does so twice."""
        self._begin()
        param, view = self._params[place], self._whole.views[place]
        if param.grad is None:
            grad = torch.zeros((), dtype=view.dtype, device=view.device)
        else:
            grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        if place in self._arrived:
            view.add_(grad)
        else:
            view.copy_(grad)
        param.grad = None
        self._arrived.add(place)

    @torch.no_grad()
    def complete(self) -> None:
        """Nothing more comes: of a parameter that handed nothing in, the gradient is zero."""
        self._begin()
        for place, view in enumerate(self._whole.views):
            if place not in self._arrived:
                view.zero_()

    def _begin(self) -> None:
        """Have a flat buffer, of which nothing is zeroed that is overwritten anyway."""
        self._check_here()
        if not self._is_allocated:
            self._is_allocated = True
            self._whole.allocate()
            for start, stop in self._gaps:
                self.flat[start:stop].zero_()

    def forget(self) -> None:
        """A backward failed: what was handed in is lost."""
        self._arrived.clear()
        if self._is_allocated:
            self._is_allocated = False
            self._whole.free()

    def adopt(self) -> None:
        for name, param in zip(self._names, self._params, strict=True):
            if param.grad is not None:
                raise ConfigError(
                    f"parameter '{name}' was given a gradient by hand, but this ZeRO stage shards gradients: they are what "
                    "backward adds up, and p.grad is None outside it; let the loss say it, or use stage 0 or 1"
                )

    def keep(self) -> None:
        own = self.flat[self._start : self._stop]
        if self._is_zero:
            self._shard.copy_(own)
        else:
            self._shard.add_(own)
        self._is_zero = False
        self.forget()

    def zero(self) -> None:
        self._check_here()
        self.forget()
        for param in self._params:
            param.grad = None
        if not self._is_zero:
            self._shard.zero_()
        self._is_zero = True


class HostGradients(ShardedGradients):
    """As those, of which each shard goes to host memory as soon as the ranks have averaged it.

    It stays in the dtype in which it was sent, and is added up in the other one only when a second micro batch comes: an
    optimizer reads 2 bytes of an element where it would read 4.
    """

    _landed: Tensor | None = None  # [shard] the last one, of the dtype that was sent
    _arrival: Arrival | None = None  # it is on its way
    _is_single = False  # it is the sum; else it is still to be added to the sum, if it has not been

    def _make_shard(self) -> Tensor:
        self._is_single = False
        return torch.zeros(0, dtype=self._sums.dtype)  # until it is needed

    @property
    def shard(self) -> Tensor:
        self._settle()
        if self._shard.numel() < self._stop - self._start:
            self._shard = super()._make_shard()
        if self._is_single and self._landed is not None:
            self._shard.copy_(self._landed)
            self._is_single = False
        return self._shard

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        self._settle()
        whole = self._landed if self._is_single and self._landed is not None else self.shard
        yield start, whole[start:stop]

    def keep(self) -> None:
        self._settle()
        if not self._is_zero and self._is_single:
            _ = self.shard  # which it is added to
        own = self.flat[self._start : self._stop]
        if self._landed is None:
            pinned = self._sums.pin_memory
            self._landed = torch.empty(own.numel(), dtype=own.dtype, pin_memory=pinned)
        self._arrival = Arrival(own, self._landed)
        self._is_single, self._is_zero = self._is_zero, False
        self.forget()

    def _settle(self) -> None:
        """Have here what is on its way, and in the sum if it is a part of it."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None and self._landed is not None:
            arrival.wait()
            if not self._is_single:
                self._shard.add_(self._landed)

    def zero(self) -> None:
        self._settle()
        self._is_single = False
        super().zero()


def make_gradients(  # noqa: PLR0913
    placement: Placement,
    names: Sequence[str],
    params: Sequence[nn.Parameter],
    layout: FlatLayout,
    *,
    dtype: torch.dtype,
    precision: Precision,
    device: torch.device,
    index: int,
    num_shards: int,
    is_alone: bool,
    home: PartHome,
    frees: bool,
) -> Gradients:
    """Gradients of parameters of this `dtype` and placement, for shard `index`; `is_alone`: there is no other rank.

    `frees`: gradients go to host memory during backward where the optimizer steps there, and `home` says whether these do.
    """
    is_sharded = placement is Placement.SHARDED and (num_shards > 1 or frees)
    is_added_up_wider = dtype != torch.float32 and precision.sums == torch.float32 and not is_sharded
    if is_alone and not is_added_up_wider and not is_sharded:
        return OwnGradients(names, params, layout)
    sent = torch.float32 if is_added_up_wider else (precision.sent or dtype)
    if sent.itemsize < dtype.itemsize and not is_sharded:
        raise ConfigError(
            f"communication_data_type is narrower than parameter '{names[0]}', which is {dtype}: micro batches would be added "
            "up in it, too; write stage 2 or 3, where they are not, or leave it out"
        )
    whole = FlatBuffer(layout, dtype=sent, device=device)
    if is_sharded:
        place = SumPlace(
            dtype=precision.sums or torch.float32,
            device=torch.device("cpu") if home.steps_on_host else device,
            pin_memory=home.pins_states,
        )
        sharded = HostGradients if home.steps_on_host else ShardedGradients
        return sharded(names, params, whole, sums=place, index=index, num_shards=num_shards)
    kind = AccumulatedGradients if sent != dtype else ReplicatedGradients
    return kind(names, params, whole, shard=whole.shard(index, num_shards=num_shards))

"""The gradients of one sub-buffer: where autograd leaves them, and what is kept of them between backwards.

A rank that is alone has what autograd makes, and no copy of it. Replicated gradients are one flat buffer for
good, into whose views autograd adds; where their sum is to be float32 and they are not, each is handed in and
added (replicated_gradients.py). For sharded ones see sharded_gradients.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from ...comm.collectives import Collectives
from ...errors import ConfigError
from ..parameters.flat_buffer import FlatBuffer
from ..parameters.layout import FlatLayout


class HostSums(Protocol):
    """Sums of gradients in host memory, from which an optimizer may step while a backward goes on."""

    def watch(self, *, before_change: Callable[[], None], landed: Callable[[], None]) -> None:
        """Have these called from now on: `before_change` before the sum changes, `landed` when a backward's
        part of it is on its way here.
        """

    def take(self) -> Tensor:
        """Return the sum, [shard], as the caller's own, and start again at zero."""


class Gradients(ABC):
    """Gradients of the parameters in `params`, in the order of the layout's slots."""

    # reduced in every backward; else in a step's last backward, or in the step
    is_reduced_in_backward: ClassVar[bool] = False
    is_on_host: ClassVar[bool] = False  # `pieces` returns host memory, whatever device computes

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter]) -> None:
        self._names, self._params = tuple(names), tuple(params)
        self._is_here = True
        self._watches_own = self.was_own_bad = False

    def watch_own(self, is_on: bool) -> None:
        """Start or stop checking whether what this rank makes is finite before the ranks average it; the
        check costs a pass.
        """
        self._watches_own, self.was_own_bad = is_on, False

    def look_at_own(self) -> None:  # noqa: B027  # a rank without peers makes the average
        """Check this rank's own gradients, which are complete and not averaged yet."""

    @abstractmethod
    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's part of the average, from `start` to `stop` in its shard: 1-D tensors in order,
        and where each begins.
        """

    def squares(self) -> Sequence[float] | None:
        """Sums of squares of the pieces that the norm takes, where they were made in time;
        None: read the pieces.
        """
        return None

    @property
    def unaveraged(self) -> Tensor | None:
        """Gradients that this rank has made and no rank has averaged yet; None if all are averages."""
        return None

    @property
    def host_sums(self) -> HostSums | None:
        """The gradients as HostSums, where an optimizer may step from them while a backward goes on."""
        return None

    # Calls for gradients that lie elsewhere between their uses:

    def start_in(self) -> None:  # noqa: B027  # most are always here
        """Begin to bring here the tensors that `pieces` returns."""

    def let_go(self) -> None:  # noqa: B027
        """Give up the tensors that `pieces` returned."""

    @abstractmethod
    def adopt(self) -> None:
        """Take over the user's changes of `p.grad` since the last call.

        Errors: ConfigError if that has no meaning
        """

    @abstractmethod
    def averages(self, indices: Sequence[int], comm: Collectives) -> list[Tensor]:
        """Return float32 copies of the ranks' averages of the parameters at these places, in their shapes.

        Order: a collective, one for all of them
        """

    @abstractmethod
    def replace(self, index: int, value: Tensor) -> None:
        """Replace the average at `index`; every rank gives the same value."""

    @abstractmethod
    def replace_own(self, index: int, value: Tensor) -> None:
        """Replace the average of what this rank's shard holds of the parameter, 1-D.

        Errors: ConfigError where the shard is no more this rank's than another's
        """

    @abstractmethod
    def take_off(self) -> Sequence[Tensor]:
        """Take the gradients off and return their tensors; no `p.grad` leads there until `put_on`, so the
        memory may go.
        """

    @abstractmethod
    def put_on(self) -> None:
        """Undo `take_off`, and add what autograd made of parameters meanwhile."""

    def held(self) -> tuple[Tensor, ...]:
        """Tensors that have memory, wherever it lies."""
        with torch._C.DisableTorchFunctionSubclass():  # freed parameters would ask Python
            grads = [param.grad for param in self._params]
        return tuple(grad for grad in grads if grad is not None and not grad.is_sparse)

    @property
    def is_here(self) -> bool:
        """True unless they are taken off."""
        return self._is_here

    def _check_here(self) -> None:
        if not self._is_here:
            raise ConfigError(
                f"the gradient of '{self._names[0]}' is in host memory, where engine.offload_states() has "
                "put it; call engine.reload_states() first"
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
        self._order = sorted(range(len(self._slots)), key=lambda index: self._slots[index].offset)
        self._taken_off: list[Tensor | None] = []  # gradient at each index

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        for index in self._order:
            param, slot = self._params[index], self._slots[index]
            grad = torch.zeros_like(param) if param.grad is None else param.grad.detach()
            yield slot.offset, (grad.to_dense() if grad.is_sparse else grad).reshape(-1)

    def averages(self, indices: Sequence[int], comm: Collectives) -> list[Tensor]:
        return [self._average(self._params[index]) for index in indices]

    def _average(self, param: nn.Parameter) -> Tensor:
        grad = torch.zeros_like(param) if param.grad is None else param.grad.detach()
        return grad.to_dense().float() if grad.is_sparse else grad.to(torch.float32, copy=True)

    def replace(self, index: int, value: Tensor) -> None:
        param = self._params[index]
        param.grad = value.to(param.dtype, copy=True)

    def replace_own(self, index: int, value: Tensor) -> None:
        self.replace(index, value.view(self._params[index].shape))

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
        """Do nothing: any value of `p.grad` counts."""

    def zero(self) -> None:
        self._check_here()
        self.release()


class FlatGradients(Gradients):
    """Gradients of which the ranks average one flat buffer."""

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter], whole: FlatBuffer) -> None:
        super().__init__(names, params)
        self._whole = whole
        self._arrived: set[int] = set()  # places of parameters whose gradients were handed in

    def held(self) -> tuple[Tensor, ...]:
        return (*super().held(), self._whole.flat)

    @property
    def flat(self) -> Tensor:
        """[numel] The buffer that the ranks average in place."""
        return self._whole.flat

    def look_at_own(self) -> None:
        if self._watches_own:
            self.was_own_bad = self.was_own_bad or not bool(torch.isfinite(self.flat).all())

    @property
    @abstractmethod
    def shard(self) -> Tensor:
        """[shard] This rank's part of the average."""

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        yield start, self.shard[start:stop]

    def _label(self, index: int) -> str:
        return f"the gradient of '{self._names[index]}'"

    def _cut(self, whole: Tensor, index: int) -> Tensor:
        slot = self._whole.layout.slots[index]
        return whole[slot.offset : slot.offset + slot.numel].view(slot.shape).to(torch.float32, copy=True)

    # ---- the reducer's calls

    @abstractmethod
    def hand_in(self, index: int) -> None:
        """Take the finished gradient of the parameter at `index`, one of those that this backward has
        averaged.
        """

    @property
    def is_complete(self) -> bool:
        """True once all parameters' gradients were handed in."""
        return len(self._arrived) == len(self._params)

    @abstractmethod
    def complete(self) -> None:
        """Set to zero what was not handed in: the ranks average `flat` from now on."""

    @abstractmethod
    def keep(self) -> None:
        """Keep the average, which `flat` holds now."""

    @property
    @abstractmethod
    def is_late(self) -> bool:
        """True between backwards if gradients came after the ranks had averaged."""

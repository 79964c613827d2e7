"""Direct calls of `loss.backward()`: they mean the same as `engine.backward(loss)`, or raise.

Autograd's backward does not know micro batches or fp16's loss scale. Hooks on the parameters divide its
gradients by the number of micro batches. A missing loss scale cannot be added afterwards, so that is an
error.
Source: DeepSpeed 0.19.8 runtime/engine.py, `_backward_prologue_per_tensor`, which does it for stages 1 to 3
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..zero.model.reducer import is_reached


class DirectBackward:
    """Watch over the backwards that reach these parameters, if their gradients may need a factor."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        has_loss_scale: bool,
        loss_scale: Callable[[], float],
        divisor: Callable[[], float],
    ) -> None:
        """`loss_scale` returns the factor of the loss; `divisor` the divisor of a gradient, the number of
        micro batches in a step.
        """
        self._params = tuple(params)
        self._has_loss_scale = has_loss_scale
        self._loss_scale = loss_scale
        self._divisor = divisor
        self._num_known = 0  # backwards under way whose losses already have their factors
        self._hooks: list[Any] = []
        self.watch_if_needed()

    def watch_if_needed(self) -> None:
        """Watch from now on if there may be a factor.

        It costs a Python call for each parameter in every backward.
        """
        if self._hooks or not (self._has_loss_scale or self._divisor() != 1):
            return
        self._hooks = [
            param.register_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, param in enumerate(self._params)
            if param.requires_grad
        ]

    @contextmanager
    def known(self) -> Iterator[None]:
        """Mark the backward inside as the engine's."""
        self._num_known += 1
        try:
            yield
        finally:
            self._num_known -= 1

    def known_from(self, loss: Tensor) -> Tensor:
        """Return this loss, which already has its factors, so that a backward from it needs no others."""
        if self._hooks and loss.requires_grad:  # otherwise no backward begins with it
            reference = weakref.ref(self)

            def begin(_: Tensor) -> None:
                watcher = reference()
                if watcher is not None:
                    watcher._num_known += 1
                    torch.autograd.Variable._execution_engine.queue_callback(watcher._end)

            loss.register_hook(begin)  # type: ignore[no-untyped-call]
        return loss

    def forget(self) -> None:
        """Note that no backward is under way, because a backward that failed does not report its end."""
        self._num_known = 0

    def release(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, index: int) -> Callable[[Tensor], Tensor]:
        reference = weakref.ref(self)  # torch holds hooks where the garbage collector does not look

        def part_of(gradient: Tensor) -> Tensor:
            watcher = reference()
            return gradient if watcher is None else watcher._part_of(gradient, index)

        return part_of

    def _end(self) -> None:
        self._num_known = max(self._num_known - 1, 0)

    def _part_of(self, gradient: Tensor, index: int) -> Tensor:
        if self._num_known or not is_reached(self._params[index]):
            return gradient
        if self._loss_scale() != 1.0:
            raise ConfigError(
                "backward() of a loss without fp16's loss scale: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        divisor = self._divisor()
        return gradient if divisor == 1 else gradient / divisor

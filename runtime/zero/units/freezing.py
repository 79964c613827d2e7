"""Trained parameters that do not require a gradient for a while, and what a step leaves
alone because of that.

torch's optimizers leave alone a parameter that has no gradient: neither momentum nor weight decay moves it,
and it does not count the step. Here all gradients of a sub-buffer are one tensor, so it is said by place
which elements have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .sub_buffer import SubBuffer

REQUIRES_GRAD: Callable[[Tensor], bool] = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]


def requiring_grad(params: Iterable[Tensor]) -> list[bool]:
    """Return for each of these whether it requires a gradient, freed ones among them."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(REQUIRES_GRAD, params))


class Freezing:
    """Watch over which parameters of these sub-buffers are frozen for a while."""

    def __init__(self, sub_buffers: Sequence[SubBuffer]) -> None:
        self._sub_buffers = tuple(sub_buffers)
        self._indices = [
            (sub_buffer, index)
            for sub_buffer in self._sub_buffers
            for index in range(len(sub_buffer.members))
        ]
        self._params = [sub_buffer.members[index].param for sub_buffer, index in self._indices]
        self._frozen: frozenset[int] | None = (
            None  # flag at each index of `_indices`; None: no backward since the last step
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return which parameters the coming step leaves alone."""
        return tuple(
            self._indices[number][0].members[self._indices[number][1]].name
            for number in sorted(self._frozen or ())
        )

    def look(self) -> None:
        """Note that a backward begins: the step updates each parameter that it gives a gradient."""
        flags = requiring_grad(self._params)
        now = frozenset() if all(flags) else frozenset(i for i, flag in enumerate(flags) if not flag)
        self._set(now if self._frozen is None else self._frozen & now)

    def look_if_new(self) -> None:
        """Look, as `look` does, where the program has run its backwards by itself."""
        if self._frozen is None:
            self.look()

    def end_step(self, *, is_applied: bool) -> None:
        """Note the end of a step; `is_applied`: it was not skipped."""
        if is_applied:
            for number in self._frozen or ():
                sub_buffer, index = self._indices[number]
                sub_buffer.optimizer_shard.missed[index] = sub_buffer.optimizer_shard.missed.get(index, 0) + 1
        if self._frozen:
            self._set(frozenset())
        self._frozen = None

    def _set(self, frozen: frozenset[int]) -> None:
        if frozen != (self._frozen or frozenset()):
            indices: dict[SubBuffer, set[int]] = {sub_buffer: set() for sub_buffer in self._sub_buffers}
            for number in frozen:
                sub_buffer, index = self._indices[number]
                indices[sub_buffer].add(index)
            for sub_buffer, own in indices.items():
                sub_buffer.optimizer_shard.frozen = frozenset(own)
        self._frozen = frozen

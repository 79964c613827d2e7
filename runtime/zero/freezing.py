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
    """Of the parameters of these sub-buffers."""

    def __init__(self, parts: Sequence[SubBuffer]) -> None:
        self._parts = tuple(parts)
        self._places = [(part, place) for part in self._parts for place in range(len(part.members))]
        self._params = [part.members[place].param for part, place in self._places]
        self._frozen: frozenset[int] | None = (
            None  # by number in `_places`; None: no backward since the last step
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return which parameters the coming step leaves alone."""
        return tuple(
            self._places[number][0].members[self._places[number][1]].name
            for number in sorted(self._frozen or ())
        )

    def look(self) -> None:
        """A backward begins. What it gives a gradient is not left alone."""
        flags = requiring_grad(self._params)
        now = frozenset() if all(flags) else frozenset(i for i, flag in enumerate(flags) if not flag)
        self._set(now if self._frozen is None else self._frozen & now)

    def look_if_new(self) -> None:
        """As `look`, where the program has run its backwards by itself."""
        if self._frozen is None:
            self.look()

    def end_step(self, *, is_applied: bool) -> None:
        """The step has been; `is_applied`: it was not skipped."""
        if is_applied:
            for number in self._frozen or ():
                part, place = self._places[number]
                part.optimizer_shard.missed[place] = part.optimizer_shard.missed.get(place, 0) + 1
        if self._frozen:
            self._set(frozenset())
        self._frozen = None

    def _set(self, frozen: frozenset[int]) -> None:
        if frozen != (self._frozen or frozenset()):
            places: dict[SubBuffer, set[int]] = {part: set() for part in self._parts}
            for number in frozen:
                part, place = self._places[number]
                places[part].add(place)
            for part, own in places.items():
                part.optimizer_shard.frozen = frozenset(own)
        self._frozen = frozen

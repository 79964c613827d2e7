"""Writes of a program to parameters: by a module in its forward, as `nn.Embedding(max_norm=...)` does, or by
a loop between two steps.

Shards and float32 masters are copies, so such a write has to be found and taken over. torch counts the writes
to every tensor, and the sum of these counters tells in one pass. What is written through `p.data` is not
counted: that is found by comparing values, which is done the first time, then for one sub-buffer in turn, and
always where it was found once. On a GPU the host does not wait for the answer of the one in turn: it looks at
it in a later step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...comm.numbers import ReadBack
from ...errors import ConfigError

_log = logging.getLogger("dslaunch")

_VERSION: Callable[[Tensor], int] = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]
PIECE_NUMEL = 2**23  # elements that are compared at once
_EVERY = 16  # steps between two comparisons of the same values, where there are fewer sub-buffers


class Lying(NamedTuple):
    """A parameter, the view of a flat buffer in which its values lie, and its name."""

    param: nn.Parameter
    view: Tensor
    name: str


class Writes:
    """Writes to the parameters of one sub-buffer, while they can be written to."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = tuple(params)
        self._noted = (0, 0)
        self._is_through_data = False  # a write that was not counted has been found
        self.is_watched = False  # True between `note` and `forget`
        self.must_compare = True
        self.is_known = False  # True once values have been compared
        self._late: ReadBack | None = None  # an answer on its way to the host

    def note(self) -> None:
        """Note the present values as known."""
        self._noted = self._counters()
        self.is_watched = True

    def expect(self, num_writes: int) -> None:
        """Do not count so many of the writes that torch has counted: they are not the program's."""
        self._noted = (self._noted[0] + num_writes, self._noted[1])

    def forget(self) -> None:
        """Let all writes not count."""
        self.is_watched = False

    def are_due(self) -> bool:
        """Whether the values must be compared with what is known of them."""
        if not self.is_watched:
            return False
        return self.must_compare or self._is_through_data or self.are_counted

    @property
    def are_counted(self) -> bool:
        """Whether torch has counted a write since `note`, or a parameter has another memory."""
        return self._counters() != self._noted

    @property
    def may_compare_late(self) -> bool:
        """True if values are compared only because it is their turn."""
        return self.is_known and not (self._is_through_data or self.are_counted)

    def compare_late(self, new: Tensor, known: Tensor) -> None:
        """Ask the GPU, on which both are, whether they differ, and do not wait for it.

        An answer that is still on its way is not given up for another.
        """
        if self._late is not None:
            return
        differing = [_differ(one, other).any() for _, one, other in _pieces(new, known)]
        self._late = ReadBack(differing[0] if len(differing) == 1 else torch.stack(differing).any())

    def look_back(self, what: str) -> None:
        """Look at the result of a late comparison; `what` names the written values."""
        if self._late is not None and self._late.is_here:
            late, self._late = self._late, None
            if bool(late.wait()):
                self.say(what)

    def say(self, what: str) -> None:
        """A write has been found by its values alone.

        A program that always writes so is heard at its first step; one that begins later may have lost
        some writes before.
        """
        if not self._is_through_data:
            self._is_through_data = True
            _log.warning(
                "%s was written through .data, which torch does not count: it is taken over "
                "from now on, but the first such writes may be lost; write to the parameter itself, "
                "inside torch.no_grad()",
                what,
            )

    def _counters(self) -> tuple[int, int]:
        return sum(map(_VERSION, self._params)), sum(map(Tensor.data_ptr, self._params))


class ComparisonTurns:
    """The order in which sub-buffers compare their values, by step."""

    def __init__(self, writes: Sequence[Writes]) -> None:
        self._writes = tuple(writes)
        self._step = 0

    def go_on(self) -> None:
        """A step begins."""
        index = self._step % max(_EVERY, len(self._writes))
        self._step += 1
        if index < len(self._writes):
            self._writes[index].must_compare = True


@torch.no_grad()
def collect(lying: Iterable[Lying]) -> None:
    """Copy what a program has put in a parameter's place by `p.data = ...` to where the parameter lies.

    Errors: ConfigError for a tensor of another shape
    """
    for param, view, name in _moved(lying):
        if param.shape != view.shape:
            raise ConfigError(
                f"parameter '{name}' was given data of shape {tuple(param.shape)}, and had "
                f"{tuple(view.shape)} at initialize(); give it data of that shape, or change the model's "
                "shapes before initialize()"
            )
        view.copy_(param.detach().clone())  # `param` may be another view of the same memory
        param.data = view


def check_in_place(lying: Iterable[Lying], *, is_anothers: Callable[[nn.Parameter], bool]) -> None:
    """Errors: ConfigError for a parameter that has another memory, or reads the same in
    another shape or order
    """
    for param, view, name in _moved(lying):
        if is_anothers(param):
            raise ConfigError(
                f"parameter '{name}' was given to another initialize() since, so another engine trains it: a "
                "parameter has one engine; call destroy() on an engine before its model is given to "
                "initialize() again, and give two engines no module in common"
            )
        if param.data_ptr() == view.data_ptr() and param.dtype == view.dtype:
            raise ConfigError(
                f"parameter '{name}' has shape {tuple(param.shape)} and strides {param.stride()}: "
                f"initialize() had given it shape {tuple(view.shape)} and strides {view.stride()}; change "
                "shapes before initialize(), and later change a parameter's values only in place"
            )
        raise ConfigError(
            f"parameter '{name}' is {param.dtype} on {param.device} in memory of its own: initialize() had "
            f"placed it in a flat {view.dtype} buffer on {view.device}; convert or move the model before "
            "initialize(), and later change a parameter's values only in place"
        )


def _moved(lying: Iterable[Lying]) -> Iterator[Lying]:
    for entry in lying:
        if not entry.param.is_set_to(
            entry.view
        ):  # `p.data = p.data.t()` keeps the memory and changes the order
            yield entry


def first_difference(new: Tensor, known: Tensor) -> int | None:
    """Return the first element, counted through, in which `new` is not `known` in its dtype; None if there is
    none. NaN is no other number than NaN.
    """
    for start, piece, other in _pieces(new, known):
        if not torch.equal(piece, other):
            differing = _differ(piece, other).nonzero()
            if differing.numel():
                return start + int(differing[0])
    return None


def _pieces(new: Tensor, known: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Cut both, so that the memory which a comparison needs beside them, 6 to 8 bytes for each element, does
    not grow with a unit. Each piece comes with its place.
    """
    new, known = new.reshape(-1), known.reshape(-1)
    if new.itemsize == 1 and new.dtype == known.dtype:  # torch compares no floats of 8 bits
        new, known = new.view(torch.uint8), known.view(torch.uint8)
    for start in range(0, max(1, new.numel()), PIECE_NUMEL):
        piece = new[start : start + PIECE_NUMEL]
        yield start, piece, known[start : start + PIECE_NUMEL].to(piece.dtype)


def _differ(new: Tensor, known: Tensor) -> Tensor:
    return (new != known) & ~(new.isnan() & known.isnan())

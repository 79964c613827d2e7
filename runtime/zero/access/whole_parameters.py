"""Parameters that are divided over ranks, shown whole for a while: to a state_dict, to a program that reads
or writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..parameters.writes import first_difference
from ..units.sub_buffer import SubBuffer
from ..units.unit import Unit


class _Shown(NamedTuple):
    param: nn.Parameter
    part: Tensor  # the memory of its own values
    sub_buffer: SubBuffer


class WholeParameters:
    """Parameters that are here: those that are divided have the whole's values and shape until `close`."""

    def __init__(self, params: Iterable[tuple[SubBuffer, int]]) -> None:
        """Take pairs of a sub-buffer and the index of a member."""
        self._params = [one for one in params if one[0].domain.parts is not None]
        self._shown: list[_Shown] = []

    @torch.no_grad()
    def open(self) -> None:
        """Gather the whole values.

        Order: a collective
        """
        for sub_buffer, index in self._params:
            param = sub_buffer.members[index].param
            part = param.data
            whole = sub_buffer.gather_parts(index, part)
            self._shown.append(_Shown(param, part, sub_buffer))
            param.data = whole

    @torch.no_grad()
    def close(self) -> None:
        """Let the parameters be parts again, with what has been written meanwhile."""
        shown, self._shown = self._shown, []
        for param, part, sub_buffer in shown:
            cut = sub_buffer.domain.cut_of(param)
            whole = param.data
            param.data = part
            if cut is not None and tuple(whole.shape) == cut.shape:
                new = cut.take(whole)
                if first_difference(new, part) is not None:
                    param.copy_(new)  # a write that torch counts


@contextmanager
def whole_parameters(units: Iterable[Unit]) -> Iterator[None]:
    """Have all divided parameters of these units whole inside; what is written to them counts.

    Order: a collective
    """
    shown = WholeParameters(
        (sub_buffer, index)
        for unit in units
        for sub_buffer in unit.sub_buffers
        for index in range(len(sub_buffer.members))
    )
    try:
        shown.open()
        yield
    finally:
        shown.close()

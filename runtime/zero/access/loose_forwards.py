"""Forwards without gradients outside of a block, of which each rank may run as many as it likes.

[Note: forwards that others do not run]
A rank whose answer or data end early does something else, while another one still gathers unit after unit. So
forwards without gradients are in a lockstep of their own, see lockstep.py. It opens with the first of them; a
rank that comes to any other collective leaves it, and follows the others until none runs any.

Only what passes through a wire of ours can be waited for so: a barrier of the program's own cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ...comm.rank_group import RankGroup
from ...comm.wire import Wire, nothing_before
from ..units.unit import Unit
from .lockstep import Lockstep


class LooseForwards:
    """Such forwards of one model."""

    def __init__(
        self,
        units: Sequence[Unit],
        holders: RankGroup,
        device: torch.device,
        *,
        is_running: Callable[[], bool],
    ) -> None:
        """`is_running`: whether a forward is under way."""
        self._is_running, self._wire = is_running, holders.wire
        self._world: object = None  # as it was in the last of them
        self.lockstep = Lockstep(holders, device, units)

    def begin(self) -> None:
        """Begin a forward, which is about to gather its first unit.

        Order: a collective
        """
        if Wire.before_next == self.end:
            Wire.before_next = None
        else:
            end_loose_forwards()
        self.lockstep.begin_forward()
        self._world = dist.group.WORLD
        Wire.before_next = self.end

    def end_forward(self) -> None:
        """End a forward that has not failed.

        Order: a collective
        """
        Wire.before_next = None
        self.lockstep.end_forward()
        Wire.before_next = self.end

    def end(self) -> None:
        """Run no more of them, and follow the ranks that do.

        Order: a collective
        """
        if self._is_running():
            return
        Wire.before_next = None
        if dist.group.WORLD is not self._world:  # the ranks of an earlier job
            return
        # Gathers for others are in no backward of this rank, and no gradients are due before them.
        before_gather, self._wire.before_gather = self._wire.before_gather, nothing_before
        try:
            self.lockstep.follow()
        finally:
            self._wire.before_gather = before_gather

    def forget(self) -> None:
        """End these forwards, and know no more of them.

        Order: a collective
        """
        if Wire.before_next == self.end:
            self.end()
            Wire.before_next = None


def end_loose_forwards() -> None:
    """End those that are open, of whichever model, but for a forward that is under way.

    Order: a collective
    """
    if Wire.before_next is not None:
        Wire.before_next()

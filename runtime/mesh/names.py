"""Names of parameters where several ranks use one name for different parameters, such as those of experts,
which every rank counts from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from ..comm.rank_group import RankGroup


class NamesByRank:
    """Names of such parameters in the whole model, and the ranks that hold them."""

    def __init__(self, group: RankGroup, names: Mapping[str, Sequence[str]]) -> None:
        """`names` maps a name on this rank to the names in the whole model, one for each rank of
        the group.
        """
        self._group = group
        self._names = {name: tuple(those) for name, those in names.items()}

    def own(self, name: str) -> str:
        """Return the name in the whole model of the parameter that this rank calls `name`."""
        return self.all(name)[self._group.index]

    def all(self, name: str) -> tuple[str, ...]:
        """Return the names in the whole model, by rank, of the parameters that the ranks call `name`."""
        return self._names[name]

    def gather(self, value: Tensor, *, what: str) -> list[Tensor]:
        """Return every rank's value, of one shape, on every rank.

        Order: a collective
        """
        own = value.contiguous()
        received = [own.new_empty(own.shape) for _ in range(self._group.size)]
        sent_bytes = own.nbytes * (self._group.size - 1)
        flight = self._group.wire.begin("all_gather", own, what, sent_bytes=sent_bytes)
        send = partial(dist.all_gather, received, own, group=self._group.axis.group, async_op=True)
        flight.start(send).wait()
        return received

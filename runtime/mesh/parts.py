"""Parts of tensors that are divided over the ranks along an axis, and how they are made whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import prod

import torch.distributed as dist
from torch import Tensor, nn

from ..comm.rank_group import RankGroup
from .cut import Cut, are_whole

Cuts = tuple[Cut, ...]  # cuts of one tensor, by rank along the axis


class Parts:
    """The parts of some parameters, and the ranks that hold them."""

    def __init__(self, group: RankGroup, cuts: Iterable[tuple[nn.Parameter, Cut]]) -> None:
        """`cuts` are the cuts of this rank's parts.

        Order:  a collective
        Errors: AssertionError unless the ranks' parts make up whole tensors
        """
        self.group = group
        own = list(cuts)
        everywhere = group.all_gather_objects([cut for _, cut in own], what="how parameters are divided")
        self._cuts: Mapping[int, Cuts] = {
            id(param): found for (param, _), found in zip(own, zip(*everywhere, strict=True), strict=True)
        }
        for (param, _), found in zip(own, self._cuts.values(), strict=True):
            if not are_whole(found):
                raise AssertionError(f"the ranks' parts of {tuple(param.shape)} are not one whole: {found}")

    def of(self, param: nn.Parameter) -> Cuts:
        """Return how all ranks' parts of a parameter are cut."""
        return self._cuts[id(param)]

    def own(self, param: nn.Parameter) -> Cut:
        """Return how this rank's part of the parameter is cut."""
        return self.of(param)[self.group.index]

    def gather(self, part: Tensor, cuts: Cuts, *, what: str) -> Tensor:
        """Return the whole on every rank.

        Order: a collective
        """
        sent, received = _buffers(part, cuts)
        num_bytes = sent.nbytes * (self.group.size - 1)
        flight = self.group.begin("all_gather", None, what, sent_bytes=num_bytes)
        flight.start(
            partial(dist.all_gather, received, sent, group=self.group.axis.group, async_op=True)
        ).wait()
        return _put_together(received, cuts)


def _buffers(part: Tensor, cuts: Cuts) -> tuple[Tensor, list[Tensor]]:
    """Return the buffer to send, which has the same size on every rank, and the buffers to receive."""
    most = max(_numel(cut) for cut in cuts)
    sent = part.reshape(-1)
    if sent.numel() < most:
        sent = part.new_zeros(most)
        sent[: part.numel()] = part.reshape(-1)
    return sent.contiguous(), [part.new_empty(most) for _ in cuts]


def _put_together(received: list[Tensor], cuts: Cuts) -> Tensor:
    whole = received[0].new_empty(cuts[0].shape)
    for flat, cut in zip(received, cuts, strict=True):
        cut.put(flat[: _numel(cut)].view(cut.part_shape), whole)
    return whole


def _numel(cut: Cut) -> int:
    return prod(cut.part_shape)

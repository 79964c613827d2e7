"""Sharded parameters that an optimizer needs as whole tensors: each is owned by one rank of the shard axis.

One all_to_all sends the pieces from all shards to the owners, and another one sends them back. Owners are
chosen so that ranks own about equally many elements; a parameter is never cut, so a very large one makes its
owner's part larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..zero.parameters.layout import Fragment
from ..zero.units.sub_buffer import SubBuffer

_Pieces = list[tuple[int, Fragment]]  # number of a parameter, and which fragment of it


def choose_owners(numels: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return the owner of each parameter: in order of size, each goes to the rank that owns the fewest
    elements so far.
    """
    load = [0] * num_ranks
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        owner = load.index(min(load))
        owners[index] = owner
        load[owner] += numels[index]
    return tuple(owners)


class WholeTensors:
    """The parameters at these places of these sub-buffers, numbered from 0 in the same way on all ranks."""

    def __init__(
        self, indices: Sequence[tuple[SubBuffer, int]], owners: Sequence[int], comm: Collectives
    ) -> None:
        """`owners` of the parameters, as ranks of the shard axis."""
        self._comm = comm
        self._indices = tuple(indices)
        self._device = indices[0][0].device
        shards, rank = comm.mesh.state_peers, comm.mesh.states_axis.index  # rank -> the shard that it holds
        ranks = range(len(shards))
        self._numels = [sub_buffer.layout.slots[index].numel for sub_buffer, index in indices]
        self.owned = tuple(number for number, owner in enumerate(owners) if owner == rank)

        def pieces(numbers: Sequence[int], shard: int) -> _Pieces:
            fragments = []
            for number in numbers:
                sub_buffer, index = indices[number]
                fragment = sub_buffer.layout.fragment(
                    sub_buffer.layout.slots[index], shard, num_shards=len(ranks)
                )
                if fragment is not None:
                    fragments.append((number, fragment))
            return fragments

        everything = range(len(indices))
        # by other rank: the pieces of this shard that it owns, and the pieces of its shard that this rank
        # owns
        self._theirs = [
            pieces([number for number in everything if owners[number] == owner], shards[rank])
            for owner in ranks
        ]
        self._ours = [pieces(self.owned, shard) for shard in shards]

    @property
    def held(self) -> tuple[tuple[int, Fragment], ...]:
        """Number and fragment of each value in this rank's shard, in the order in which they are sent."""
        return tuple(piece for peer in self._theirs for piece in peer)

    def index(self, number: int) -> tuple[SubBuffer, int]:
        """Return the sub-buffer of parameter `number`, and its index there."""
        return self._indices[number]

    def collect(self, own: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the parameters that this rank owns, whole, from the pieces in `held` of every rank.

        Shapes: 1-D float32
        Order:  a collective
        """
        arrived = self._exchange(own, self._theirs, self._ours)
        whole = {number: arrived.new_empty(self._numels[number]) for number in self.owned}
        for number, fragment, piece in _cut(arrived, self._ours):
            _run(whole[number], fragment).copy_(piece)
        return whole

    def hand_back(self, whole: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the new values of the pieces in `held`, cut from the owners' whole parameters.

        Order: a collective
        """
        pieces = [_run(whole[number], fragment) for peer in self._ours for number, fragment in peer]
        arrived = self._exchange(pieces, self._ours, self._theirs)
        return [piece for _, _, piece in _cut(arrived, self._theirs)]

    def _exchange(self, pieces: Sequence[Tensor], sent: list[_Pieces], received: list[_Pieces]) -> Tensor:
        buffer = (
            torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.float32, device=self._device)
        )
        return self._comm.exchange(
            buffer, sent=_numels(sent), received=_numels(received), what="whole parameters for the optimizer"
        )


def _numels(peers: list[_Pieces]) -> list[int]:
    return [sum(fragment.numel for _, fragment in peer) for peer in peers]


def _run(whole: Tensor, fragment: Fragment) -> Tensor:
    return whole[fragment.offset_in_param : fragment.offset_in_param + fragment.numel]


def _cut(buffer: Tensor, peers: list[_Pieces]) -> list[tuple[int, Fragment, Tensor]]:
    pieces = [piece for peer in peers for piece in peer]
    tensors = torch.split(buffer, [fragment.numel for _, fragment in pieces]) if pieces else ()
    return [(number, fragment, tensor) for (number, fragment), tensor in zip(pieces, tensors, strict=True)]

"""The ranks that share parameters as a 2-D mesh: values are sharded along one axis and replicated along the
other.

With `states_by_chunk` only parameters are. Of gradients and optimizer states each rank holds, of the shard
that its line shares, a part of its own: 1/N of the whole for N sharers, which is its chunk. So the chunks of
one shard lie along a replicate axis.

The sharers are in order of their ranks; number i of them sits at
(replicate, shard) = (i // shard_size, i % shard_size), so ranks of one host share a shard axis as long as
they have consecutive numbers. RANK alone decides; LOCAL_RANK may be any rotation of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch.distributed as dist

from .process_group import destroy_group, group_timeout
from .wire import before_unwired

Lines = Sequence[Sequence[int]]  # ranks of the job, each in exactly one line


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """This rank's line through the job: itself and the ranks it talks with along one axis."""

    size: int
    index: int  # this rank's index
    group: dist.ProcessGroup | None  # None: the default group, see below

    # The default group is never held. gloo's threads end with the last reference to it, and one that is
    # still alive while the interpreter shuts down may take the process with it; destroy_process_group()
    # must be the end of it.

    @property
    def is_alone(self) -> bool:
        """Whether this rank is the only one, so that there is nothing to send."""
        return self.size == 1

    @property
    def place(self) -> Axis:
        """The same without its group: for arithmetic, since a group lives as long as it is referred to."""
        return replace(self, group=None)

    def without_group(self) -> Axis:
        """Destroy its group, if it has one of its own: the group's threads and sockets end with the
        last reference to it.
        """
        if self.group is not None:
            destroy_group(self.group)
        return self.place


ALONE = Axis(size=1, index=0, group=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This rank's two axes, and all that share parameters with it."""

    replicate: Axis
    shard: Axis
    sharers: Axis
    states_by_chunk: bool = False
    copies: Axis = ALONE  # axis along which other sharers hold the same values, and train them alike
    divisor: int = 0  # sums of gradients are divided by it; 0: by the number of sharers

    @property
    def places(self) -> Mesh:
        """The same axes without their groups."""
        return replace(
            self,
            replicate=self.replicate.place,
            shard=self.shard.place,
            sharers=self.sharers.place,
            copies=self.copies.place,
        )

    @property
    def num_states(self) -> int:
        """Return the number of shards of gradients, masters and optimizer states."""
        return self.sharers.size if self.states_by_chunk else self.shard.size

    @property
    def state_index(self) -> int:
        """Index of the shard of states that this rank holds."""
        return self.chunk_index if self.states_by_chunk else self.shard.index

    @property
    def state_peers(self) -> tuple[int, ...]:
        """Return which of them each rank of `states_axis` holds, in the axis's order."""
        if self.states_by_chunk:
            return self.chunks
        return tuple(range(self.shard.size))

    @property
    def states_axis(self) -> Axis:
        """Return the ranks that hold all of them together; `state_peers` says in which order."""
        return self.sharers if self.states_by_chunk else self.shard

    @property
    def chunk_index(self) -> int:
        """This rank's 1/N of a flat buffer: a part of its shard, different on every sharer."""
        return self._chunk_of(self.sharers.index)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Return the chunk of every sharer, in their order."""
        return tuple(self._chunk_of(index) for index in range(self.sharers.size))

    @property
    def is_counted(self) -> bool:
        """Whether of all equal copies this rank's is the one that the norm adds and a checkpoint gets."""
        return self.copies.index == 0

    @property
    def rescale(self) -> float:
        """Factor that makes an average over the sharers the sum over `divisor`."""
        return self.sharers.size / self.divisor if self.divisor else 1.0

    @property
    def has_average(self) -> bool:
        """Whether a gradient of this rank's alone is anything else than what is trained with."""
        return not self.sharers.is_alone or self.rescale != 1.0

    def _chunk_of(self, sharer: int) -> int:
        replicate, shard = divmod(sharer, self.shard.size)
        return shard * self.replicate.size + replicate

    def without_groups(self) -> Mesh:
        """Destroy the groups of all axes; what goes to every rank of the job can still be sent."""
        axes = (self.replicate, self.shard, self.sharers, self.copies)
        for axis in {id(axis.group): axis for axis in axes}.values():
            axis.without_group()
        return self.places


def make_mesh(
    *,
    shard_size: int | None,
    states_by_chunk: bool = False,
    sharers: Lines | None = None,
    copies: Lines | None = None,
    divisor: int = 0,
) -> Mesh:
    """Arrange the N ranks of each line of `sharers`, default all, as (N / shard_size) x shard_size.

    `shard_size` None: N. Ranks in a line of `copies` hold the same values.

    Order:  every rank must call this in the same order: it may create process groups
    Errors: ValueError if `shard_size` does not divide the sharers
    """
    lines = _everyone() if sharers is None else sharers
    for line in lines:
        if len(line) % (shard_size or 1) != 0:
            raise ValueError(f"shard_size={shard_size} does not divide the {len(line)} ranks")
    columns = [
        line[start::size] for line in lines for size in (shard_size or len(line),) for start in range(size)
    ]
    groups = _Groups()
    axis = groups.axis(lines)
    return Mesh(
        replicate=groups.axis(columns),
        shard=groups.axis(_rows(lines, shard_size)),
        sharers=axis,
        states_by_chunk=states_by_chunk and shard_size is not None and shard_size < axis.size,
        copies=ALONE if copies is None else groups.axis(copies),
        divisor=divisor,
    )


def make_axis(lines: Lines, *, takes_default: bool = False) -> Axis:
    """Make this rank's one of these lines, with process groups of their own; all ranks in one line have the
    default one if that may be.

    Order: every rank must call this in the same order
    """
    return _Groups(takes_default=takes_default).axis(lines)


def make_shard_axis(*, shard_size: int | None, sharers: Lines | None = None) -> Axis:
    """Make the shard axis of such a mesh once more, with process groups of its own.

    Order: every rank must call this in the same order
    """
    return make_axis(_rows(_everyone() if sharers is None else sharers, shard_size))


def _everyone() -> Lines:
    return [range(dist.get_world_size())]


def _rows(lines: Lines, shard_size: int | None) -> Lines:
    return [
        line[start : start + (shard_size or len(line))]
        for line in lines
        for start in range(0, len(line), shard_size or len(line))
    ]


class _Groups:
    """The process groups of one mesh: axes along the same lines have the same one."""

    def __init__(self, *, takes_default: bool = True) -> None:
        """Without `takes_default` even all ranks in one line get a group of their own."""
        self._takes_default = takes_default
        self._made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

    def axis(self, lines: Lines) -> Axis:
        """Make what this rank's line needs; every rank takes part in the making of all."""
        rank = dist.get_rank()
        own = next(tuple(line) for line in lines if rank in line)
        longer = tuple(tuple(line) for line in lines if len(line) > 1)
        is_default = self._takes_default and len(own) == dist.get_world_size()
        if (
            longer and not is_default and longer not in self._made
        ):  # also where this rank is alone in its line
            self._made[longer] = _make_groups(longer, own)
        return Axis(size=len(own), index=own.index(rank), group=self._made.get(longer))


_numbers = count()  # ranks make their groups in the same order


def _make_groups(lines: Lines, own: Sequence[int]) -> dist.ProcessGroup | None:
    """Make a group of each line, and return this rank's.

    NCCL splits its communicator into all of them at once. One by one each is a split of its own, in which all
    ranks wait for each other: 136 for a mesh of 64 x 8.

    Of a group that is split off torch's reports have a description, and a name that may differ between its
    ranks: a hash of the ranks and of how many groups this one is in. There is no way to say another.
    """
    description = f"dslaunch:{next(_numbers)}"
    before_unwired()
    if _can_split():
        split: dist.ProcessGroup | None = dist.split_group(
            split_ranks=[list(line) for line in lines], timeout=group_timeout(), group_desc=description
        )
        return split
    group = None
    for line in lines:
        new = dist.new_group(list(line), timeout=group_timeout(), group_desc=description)
        group = new if tuple(line) == tuple(own) else group
    return group


def _can_split() -> bool:
    """Whether the default group is NCCL's alone, with a communicator that is there: it is bound to a GPU."""
    default = dist.group.WORLD
    if default is None or default.bound_device_id is None or dist.get_backend() != "nccl":
        return False
    return bool(default._get_backend(default.bound_device_id).supports_splitting)

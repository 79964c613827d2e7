"""The ranks as a 2-D mesh: values are sharded along one axis and replicated along the other.

With `states_by_chunk` only parameters are. Of gradients and optimizer states each rank holds, of the shard
that its line shares, a part of its own: 1/world of the whole, which is its chunk. So the chunks of one shard
lie along a replicate axis.

Rank r sits at (replicate, shard) = (r // shard_size, r % shard_size), so ranks of one host share a shard axis
as long as they have consecutive numbers. RANK alone decides; LOCAL_RANK may be any rotation of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist

from .process_group import group_timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """This rank's line through the mesh: itself and the ranks it talks with along one axis."""

    size: int
    index: int  # of this rank
    group: dist.ProcessGroup | None  # None: the default group, see below

    # The default group is never held. gloo's threads end with the last reference to it, and one that is
    # still alive while the interpreter shuts down may take the process with it; destroy_process_group()
    # must be the end of it.

    @property
    def is_alone(self) -> bool:
        """Whether this rank is the only one, so that there is nothing to send."""
        return self.size == 1

    def without_group(self) -> Axis:
        """Destroy its group, if it has one of its own: the group's threads and sockets end with the
        last reference to it.
        """
        if self.group is not None:
            dist.destroy_process_group(self.group)
        return replace(self, group=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This rank's two axes, and the world."""

    replicate: Axis
    shard: Axis
    world: Axis
    states_by_chunk: bool = False

    @property
    def places(self) -> Mesh:
        """The same axes without their groups: for arithmetic, since a group lives as long as
        it is referred to.
        """
        return replace(
            self,
            replicate=replace(self.replicate, group=None),
            shard=replace(self.shard, group=None),
            world=replace(self.world, group=None),
        )

    @property
    def num_states(self) -> int:
        """Return the number of shards of gradients, masters and optimizer states."""
        return self.world.size if self.states_by_chunk else self.shard.size

    @property
    def state_index(self) -> int:
        """Return which of them this rank holds."""
        return self.chunk_index if self.states_by_chunk else self.shard.index

    @property
    def state_peers(self) -> tuple[int, ...]:
        """Return which of them each rank of `states_axis` holds, in the axis's order."""
        if self.states_by_chunk:
            return tuple(self.chunk_of(rank) for rank in range(self.world.size))
        return tuple(range(self.shard.size))

    @property
    def states_axis(self) -> Axis:
        """Return the ranks that hold all of them together; `state_peers` says in which order."""
        return self.world if self.states_by_chunk else self.shard

    @property
    def chunk_index(self) -> int:
        """This rank's 1/world of a flat buffer: a part of its shard, different on every rank."""
        return self.chunk_of(self.world.index)

    def chunk_of(self, rank: int) -> int:
        """Return the chunk of any rank."""
        replicate, shard = divmod(rank, self.shard.size)
        return shard * self.replicate.size + replicate

    def without_groups(self) -> Mesh:
        """Destroy the groups of the two axes; nothing is sent along them from then on."""
        replicate, shard = self.replicate.without_group(), self.shard.without_group()
        return replace(self, replicate=replicate, shard=shard)


def make_mesh(*, shard_size: int, states_by_chunk: bool = False) -> Mesh:
    """Arrange all ranks as (world / shard_size) x shard_size.

    Order:  every rank must call this in the same order: it may create process groups
    Errors: ValueError if `shard_size` does not divide the world
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size % shard_size != 0:
        raise ValueError(f"shard_size={shard_size} does not divide the {world_size} ranks")
    columns = [range(shard, world_size, shard_size) for shard in range(shard_size)]
    rows = [range(row * shard_size, (row + 1) * shard_size) for row in range(world_size // shard_size)]
    return Mesh(
        replicate=_make_axis(columns, rank=rank, world_size=world_size),
        shard=_make_axis(rows, rank=rank, world_size=world_size),
        world=_make_axis([range(world_size)], rank=rank, world_size=world_size),
        states_by_chunk=states_by_chunk and shard_size < world_size,
    )


def make_shard_axis(*, shard_size: int) -> Axis:
    """Make the shard axis of such a mesh once more, with process groups of its own.

    Order: every rank must call this in the same order
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = [range(row * shard_size, (row + 1) * shard_size) for row in range(world_size // shard_size)]
    return _make_axis(rows, rank=rank, world_size=world_size, is_default_for_all=False)


def _make_axis(lines: list[range], *, rank: int, world_size: int, is_default_for_all: bool = True) -> Axis:
    own = next(line for line in lines if rank in line)
    group: dist.ProcessGroup | None = None
    if 1 < len(own) < world_size or (len(own) > 1 and not is_default_for_all):
        group = _make_groups(lines, own)
    return Axis(size=len(own), index=own.index(rank), group=group)


def _make_groups(lines: list[range], own: range) -> dist.ProcessGroup | None:
    """Make a group of each line, and return this rank's; every rank takes part in the making of all.

    NCCL splits its communicator into all of them at once. One by one each is a split of its own, in which all
    ranks wait for each other: 136 for a mesh of 64 x 8.
    """
    if _can_split():
        split: dist.ProcessGroup | None = dist.split_group(
            split_ranks=[list(line) for line in lines], timeout=group_timeout()
        )
        return split
    group = None
    for line in lines:
        made = dist.new_group(list(line), timeout=group_timeout())
        group = made if line is own else group
    return group


def _can_split() -> bool:
    """Whether the default group is NCCL's alone, with a communicator that is there: it is bound to a GPU."""
    default = dist.group.WORLD
    if default is None or default.bound_device_id is None or dist.get_backend() != "nccl":
        return False
    return bool(default._get_backend(default.bound_device_id).supports_splitting)

"""The ZeRO stages as rows of a table: placement, residence and schedule of parameters, gradients and states.

Nothing outside this file asks for a stage; everything asks a `Policy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..errors import ConfigError


class Placement(Enum):
    """How many ranks of the shard axis hold a value."""

    REPLICATED = "replicated"  # every rank holds all of it
    SHARDED = "sharded"  # every rank holds its own 1/N of it


class Residence(Enum):
    """Which memory holds a value between its uses."""

    GPU = "gpu"  # the memory of the device that computes, host memory where there is no accelerator
    CPU = "cpu"  # pinned host memory
    NVME = "nvme"  # a file on a local disk


class ReduceAt(Enum):
    """When gradients are reduced over the ranks."""

    BOUNDARY = "boundary"  # once per optimizer step, after the last micro batch
    MICRO_BATCH = "micro_batch"  # in every backward


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """See comm/mesh.py."""

    shard_size: int
    states_by_chunk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One row of the table."""

    stage: int  # the row's name in a ds_config; for messages and getters only
    parameters: Placement
    gradients: Placement
    optimizer: Placement
    reduce_at: ReduceAt
    reshard_after_forward: bool
    reshard_after_backward: bool
    parameters_on: Residence = Residence.GPU
    gradients_on: Residence = Residence.GPU
    optimizer_on: Residence = Residence.GPU

    @property
    def is_sharded(self) -> bool:
        """Whether any of the three values is sharded."""
        return Placement.SHARDED in (self.parameters, self.gradients, self.optimizer)

    def max_unit_numel(self, *, reduce_bucket: int, prefetch_bucket: int) -> int:
        """Return how large units may be made by merging: a few whole ones are in memory, of whatever is sharded."""
        is_sharded = self.parameters is Placement.SHARDED
        return min(reduce_bucket, prefetch_bucket) if is_sharded else reduce_bucket

    def mesh_shape(self, world_size: int, *, group_size: int | None, kept_in: int | None) -> MeshShape:
        """Return over how many ranks values are sharded; the rest of the ranks replicate.

        `group_size`: everything that is sharded over so many ranks, instead of all. `kept_in`: parameters over so many,
        which then send them to nobody else, gradients and states over all.
        Errors: ConfigError if that has no meaning here
        """
        for key, size in (("mics_shard_size", group_size), ("zero_hpz_partition_size", kept_in)):
            if size is not None and world_size % size:
                raise ConfigError(
                    f"zero_optimization.{key} {size} does not divide the {world_size} ranks; write a number that does"
                )
        if not self.is_sharded:
            return MeshShape(shard_size=1)
        if group_size is not None:
            return MeshShape(shard_size=group_size)
        if kept_in is None:
            return MeshShape(shard_size=world_size)
        if self.parameters is not Placement.SHARDED:
            raise ConfigError(
                f"zero_optimization.zero_hpz_partition_size {kept_in} says who shares parameters, and at stage {self.stage} "
                "everybody has all; leave it out, or write stage 3"
            )
        return MeshShape(shard_size=kept_in, states_by_chunk=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that one rank holds between steps."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


_POLICIES = (
    Policy(
        stage=0,
        parameters=Placement.REPLICATED,
        gradients=Placement.REPLICATED,
        optimizer=Placement.REPLICATED,
        reduce_at=ReduceAt.BOUNDARY,
        reshard_after_forward=False,
        reshard_after_backward=False,
    ),
    Policy(
        stage=1,
        parameters=Placement.REPLICATED,
        gradients=Placement.REPLICATED,
        optimizer=Placement.SHARDED,
        reduce_at=ReduceAt.BOUNDARY,
        reshard_after_forward=False,
        reshard_after_backward=False,
    ),
    Policy(
        stage=2,
        parameters=Placement.REPLICATED,
        gradients=Placement.SHARDED,
        optimizer=Placement.SHARDED,
        reduce_at=ReduceAt.MICRO_BATCH,
        reshard_after_forward=False,
        reshard_after_backward=False,
    ),
    Policy(
        stage=3,
        parameters=Placement.SHARDED,
        gradients=Placement.SHARDED,
        optimizer=Placement.SHARDED,
        reduce_at=ReduceAt.MICRO_BATCH,
        reshard_after_forward=True,
        reshard_after_backward=True,
    ),
)


def policy_for_stage(stage: int) -> Policy:
    """Return the row of a ZeRO stage.

    Errors: ValueError unless `stage` is 0, 1, 2 or 3
    """
    if stage not in range(len(_POLICIES)):
        raise ValueError(f"stage={stage!r}: a ZeRO stage is one of 0, 1, 2, 3")
    return _POLICIES[stage]


def optimizer_bytes_per_element(*, num_states: int, param_bytes: int) -> int:
    """Return K: the fp32 states, plus an fp32 master where the parameter itself is not fp32.

    Adam has two states: K = 12 with 16-bit parameters, 8 with fp32 ones, which are their own master.
    """
    return 4 * num_states + (0 if param_bytes == 4 else 4)


def memory_bytes(
    policy: Policy,
    *,
    numel: int,
    param_bytes: int,
    grad_bytes: int,
    optimizer_bytes: int,
    num_shards: int,
    num_param_shards: int | None = None,
) -> Memory:
    """Return what one rank holds between steps, without padding and without the units that are in flight.

    Units:  `numel` counts trained elements; the other arguments are bytes per element, and numbers of shards
    Source: ZeRO (arXiv 1910.02054) section 3, with b = param_bytes, g = grad_bytes, K = optimizer_bytes
    """

    def held(placement: Placement, bytes_per_element: int, shards: int = num_shards) -> float:
        share = shards if placement is Placement.SHARDED else 1
        return numel * bytes_per_element / share

    return Memory(
        parameters=held(policy.parameters, param_bytes, num_param_shards or num_shards),
        gradients=held(policy.gradients, grad_bytes),
        optimizer=held(policy.optimizer, optimizer_bytes),
    )

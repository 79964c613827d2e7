"""The ZeRO stages as rows of a table: which of parameters, gradients and states are sharded.

Nothing outside this file asks for a stage; everything asks a `Policy`. When gradients are reduced follows
from where they are: a whole buffer of them adds up micro batches and is reduced once for a step, in its last
backward; shards are filled in every backward. In which memory a value lies is the matter of offload_plan.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ..errors import ConfigError


class Placement(Enum):
    """Number of ranks of the shard axis that hold a value."""

    REPLICATED = "replicated"  # every rank holds all of it
    SHARDED = "sharded"  # every rank holds its own 1/N of it


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """See comm/mesh.py."""

    shard_size: int
    states_by_chunk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    """Sizes of the units into which a model is cut, in elements."""

    max_numel: int  # largest unit that neighbours are merged to
    max_whole_numel: int = 0  # the same for neighbours of small parameters
    whole_param_numel: int = 0  # largest small parameter; 0: none is small
    whole_model_numel: int = sys.maxsize  # all small parameters that stay whole

    def are_small(self, numels: Iterable[int]) -> bool:
        """Whether all these parameters are small, so that they may stay whole where others are sharded."""
        return self.whole_param_numel > 0 and all(numel <= self.whole_param_numel for numel in numels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One row of the table."""

    stage: int  # the row's name in a ds_config; for messages and getters only
    parameters: Placement
    gradients: Placement
    optimizer: Placement
    reshard_after_forward: bool  # sharded parameters: are they freed between forward and backward?

    @property
    def is_sharded(self) -> bool:
        """Whether any of the three values is sharded."""
        return Placement.SHARDED in (self.parameters, self.gradients, self.optimizer)

    def unit_sizes(
        self, *, reduce_bucket: int, prefetch_bucket: int, max_whole: tuple[int, int], at_most: int
    ) -> UnitSizes:
        """Return how large units are made; a few that are sharded are in memory at a time, whole.

        `max_whole`: elements of a parameter, and of all, that stay whole. `at_most`: elements of any unit.
        """
        whole = min(reduce_bucket, at_most)
        if self.parameters is not Placement.SHARDED:
            return UnitSizes(max_numel=whole)
        max_param, max_model = max_whole
        return UnitSizes(
            max_numel=min(whole, prefetch_bucket),
            max_whole_numel=whole,
            whole_param_numel=max_param,
            whole_model_numel=max_model,
        )

    def mesh_shape(self, world_size: int, *, group_size: int | None, kept_in: int | None) -> MeshShape:
        """Return over how many ranks values are sharded; the rest of the ranks replicate.

        `group_size`: everything that is sharded over so many ranks, instead of all. `kept_in`: parameters
        over so many, which then gather them among themselves; gradients and states over all.
        Errors: ConfigError if that has no meaning here
        """
        for key, size in (("mics_shard_size", group_size), ("zero_hpz_partition_size", kept_in)):
            if size is not None and world_size % size:
                raise ConfigError(
                    f"zero_optimization.{key} {size} does not divide the {world_size} ranks; "
                    "write a number that does"
                )
        if not self.is_sharded:
            return MeshShape(shard_size=1)
        if group_size is not None:
            return MeshShape(shard_size=group_size)
        if kept_in is None:
            return MeshShape(shard_size=world_size)
        if self.parameters is not Placement.SHARDED:
            raise ConfigError(
                f"zero_optimization.zero_hpz_partition_size {kept_in} says how many ranks share parameters, "
                f"and at stage {self.stage} every rank has all of them; leave it out, or write stage 3"
            )
        return MeshShape(shard_size=kept_in, states_by_chunk=True)


_POLICIES = (
    Policy(
        stage=0,
        parameters=Placement.REPLICATED,
        gradients=Placement.REPLICATED,
        optimizer=Placement.REPLICATED,
        reshard_after_forward=False,
    ),
    Policy(
        stage=1,
        parameters=Placement.REPLICATED,
        gradients=Placement.REPLICATED,
        optimizer=Placement.SHARDED,
        reshard_after_forward=False,
    ),
    Policy(
        stage=2,
        parameters=Placement.REPLICATED,
        gradients=Placement.SHARDED,
        optimizer=Placement.SHARDED,
        reshard_after_forward=False,
    ),
    Policy(
        stage=3,
        parameters=Placement.SHARDED,
        gradients=Placement.SHARDED,
        optimizer=Placement.SHARDED,
        reshard_after_forward=True,
    ),
)


def policy_for_stage(stage: int) -> Policy:
    """Return the row of a ZeRO stage.

    Errors: ValueError unless `stage` is 0, 1, 2 or 3
    """
    if stage not in range(len(_POLICIES)):
        raise ValueError(f"stage={stage!r}: a ZeRO stage is one of 0, 1, 2, 3")
    return _POLICIES[stage]


def keep_small_whole(
    policy: Policy, sub_buffers: Sequence[Sequence[int]], sizes: UnitSizes
) -> tuple[Policy, ...]:
    """Return a row for each sub-buffer, which is given by the elements of its parameters.

    A sub-buffer of small parameters stays whole on every rank, as at stage 2: to gather it at each use would
    take longer than its memory is worth. The first ones do, as long as there are no more than
    `sizes.whole_model_numel` elements in all.
    Source: DeepSpeed 0.19.8 runtime/zero/parameter_offload.py, `mark_persistent_parameters`,
            parameter by parameter
    """
    whole = replace(policy, parameters=Placement.REPLICATED, reshard_after_forward=False)
    rows, num_left = [], sizes.whole_model_numel
    for numels in sub_buffers:
        stays = sizes.are_small(numels) and sum(numels) <= num_left
        num_left -= sum(numels) if stays else 0
        rows.append(whole if stays else policy)
    return tuple(rows)

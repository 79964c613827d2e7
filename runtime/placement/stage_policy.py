"""The ZeRO stages as rows of a table: which of parameters, gradients and states are sharded.

Other files never look at the stage; they ask a `Policy`. Where gradients are held decides when they are
reduced: whole gradients are added up over micro batches and reduced once, in the step's last backward;
sharded ones are reduced in every backward. offload_plan.py decides in which memory a value lies.
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

    max_numel: int  # size up to which neighbouring units are merged
    max_whole_numel: int = 0  # the same for neighbours of small parameters
    whole_param_numel: int = 0  # largest small parameter; 0: none is small
    whole_model_numel: int = sys.maxsize  # limit of the sum of the small parameters that stay whole

    def are_small(self, numels: Iterable[int]) -> bool:
        """Tell whether all these parameters are small, so that they may stay whole where others
        are sharded.
        """
        return self.whole_param_numel > 0 and all(numel <= self.whole_param_numel for numel in numels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One row of the table."""

    stage: int  # the row's name in a ds_config; for messages and getters only
    parameters: Placement
    gradients: Placement
    optimizer: Placement
    reshard_after_forward: bool  # True if sharded parameters are freed between forward and backward

    @property
    def is_sharded(self) -> bool:
        """True if any of the three kinds of value is sharded."""
        return Placement.SHARDED in (self.parameters, self.gradients, self.optimizer)

    def unit_sizes(
        self, *, reduce_bucket: int, prefetch_bucket: int, max_whole: tuple[int, int], at_most: int
    ) -> UnitSizes:
        """Return how large units are made. Of sharded units, a few at a time are whole in memory.

        `max_whole`: largest number of elements of one parameter that stays whole, and of all that do.
        `at_most`: largest number of elements of any unit.
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

        `group_size`: number of ranks over which everything is sharded, in place of all ranks. `kept_in`:
        number of ranks over which parameters are sharded, and which gather them among themselves; gradients
        and states are then sharded over all.
        Errors: ConfigError if one of these has no meaning at this stage
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

    A sub-buffer of small parameters stays whole on every rank, as at stage 2: gathering it at each use would
    take longer than its memory is worth. Only the first such sub-buffers stay whole, up to
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

"""The ranks that share sequences, for use before an engine is made: initialize() takes this module as `mpu`.

Source: DeepSpeed 0.19.8 runtime/sequence_parallel/parallel_state_sp.py, the same names
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...shared.axes import axes_of_job
from ..comm.mesh import make_axis
from ..errors import ConfigError
from ..mesh.current import sequence_axis, sharers
from .exchange import SequenceRanks

_ranks: SequenceRanks | None = None


def initialize_sequence_parallel(sequence_parallel_size: int, *, tensor_parallel_size: int = 1) -> None:
    """Let so many neighbouring ranks share sequences; if layers are divided, neighbours among the ranks that
    have the same part of the layers.

    Order:  a collective of all ranks
    Errors: ConfigError if the sizes do not divide the number of ranks
    """
    global _ranks
    if sequence_parallel_size <= 1:
        raise ValueError(f"sequence_parallel_size must be greater than 1, got {sequence_parallel_size}")
    if not dist.is_initialized():
        raise ConfigError("init_distributed() comes before sequences are divided over ranks; call it first")
    try:
        axes = axes_of_job(dist.get_world_size(), sp=sequence_parallel_size, tp=tensor_parallel_size)
    except ValueError as error:
        raise ConfigError(f"sequence_parallel_size={sequence_parallel_size}: {error}") from error
    lines, known = axes.lines(("sp",)), _alive()
    own = axes.line_of(dist.get_rank(), ("sp",))
    if known is not None and tuple(dist.get_process_group_ranks(known.group)) == own:
        _ranks = SequenceRanks.of(known.group)  # the program may have made a new default group
        return
    axis = make_axis(lines)
    _ranks = SequenceRanks.of(axis.group or dist.group.WORLD)


def _alive() -> SequenceRanks | None:
    """Return the ranks that share sequences; None once their process group was destroyed."""
    try:
        return None if _ranks is None or not _ranks.group else _ranks
    except ConfigError:
        return None


def sequence_ranks() -> SequenceRanks:
    """Return the ranks that share this one's sequences.

    Errors: ConfigError before initialize_sequence_parallel()
    """
    known = _alive()
    if known is None:
        raise ConfigError(
            "no sequence is divided over ranks yet; call UlyssesSPAttentionHF.register_with_transformers() "
            "or initialize_sequence_parallel() before"
        )
    return known


def current_ranks() -> SequenceRanks | None:
    """Return the ranks that share this rank's sequences: by the engine that was made last, or before an
    engine by initialize_sequence_parallel(); None if sequences are not divided.
    """
    axis = sequence_axis()
    if axis is None:
        return _alive()
    return None if axis.is_alone else SequenceRanks.of(axis.group or dist.group.WORLD)


def get_sequence_parallel_group() -> Any:
    """Return the process group of the ranks that share this one's sequences."""
    return sequence_ranks().group


def get_sequence_parallel_world_size() -> int:
    """Return over how many ranks a sequence is divided."""
    return sequence_ranks().size


def get_sequence_parallel_rank() -> int:
    """Return which part of a sequence this rank has."""
    return sequence_ranks().index


def get_sequence_data_parallel_group() -> Any:
    """Return the process group of all ranks that share parameters with this one; before an engine is made,
    of all ranks.
    """
    sequence_ranks()
    axis = sharers()
    return dist.group.WORLD if axis is None or axis.group is None else axis.group


def get_sequence_data_parallel_world_size() -> int:
    """Return how many ranks share parameters with this one."""
    return dist.get_world_size(get_sequence_data_parallel_group())


def get_sequence_data_parallel_rank() -> int:
    """Return this rank's number among the ranks of get_sequence_data_parallel_group()."""
    return dist.get_rank(get_sequence_data_parallel_group())


# DeepSpeed's alias, from when sequences could not be combined with other model parallelism
get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank

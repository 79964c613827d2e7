"""Which ranks share what. Layers and sequences may be divided over neighbours; the others train on data of
their
own. No expert is divided between ranks.

Source: DeepSpeed 0.19.8 utils/groups.py: what its functions return without expert parallelism
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import ConfigError
from ..mesh.current import current_axes, data_axis, sharers, tensor_axis
from ..sequence.parallel_state import current_ranks
from . import comm


def data_parallel_group() -> Any:
    """Return the group of the ranks that train the same parameters on data of their own.

    Errors: ConfigError before init_distributed()
    """
    axis = data_axis()
    if axis is not None and axis.is_alone and dist.get_world_size() > 1:
        return None if axis.group is None else axis.group
    return comm.get_world_group() if axis is None or axis.group is None else axis.group


def data_parallel_group_ranks() -> list[int]:
    """Return the ranks that train on data of their own, in order."""
    return list(current_axes().line_of(dist.get_rank(), ("dp",)))


def data_parallel_world_size() -> int:
    """Return how many ranks train on data of their own."""
    return current_axes().dp


def data_parallel_rank() -> int:
    """Return this rank's number among those."""
    return current_axes().coordinates(dist.get_rank())["dp"]


def broadcast_src_rank() -> int:
    """Return the rank whose parameters all others get."""
    return data_parallel_group_ranks()[0]


def model_parallel_world_size() -> int:
    """Return over how many ranks a layer is divided."""
    return current_axes().tp


def model_parallel_rank() -> int:
    """Return this rank's number among those."""
    return current_axes().coordinates(dist.get_rank())["tp"]


def model_parallel_group() -> Any:
    """Return the group of the ranks that hold the parts of the same layers.

    Errors: ConfigError before initialize() has divided a model
    """
    axis = tensor_axis()
    if axis.is_alone:
        raise ConfigError(
            "no layer is divided over ranks, so there is no group of them; set "
            "tensor_parallel.autotp_size in the ds_config, and ask after initialize()"
        )
    return axis.group or comm.get_world_group()


def model_parallel_src_rank() -> int:
    """Return the first of them."""
    return current_axes().line_of(dist.get_rank(), ("tp",))[0]


def sequence_parallel_world_size() -> int:
    """Return among how many ranks a sequence is divided."""
    ranks = current_ranks()
    return 1 if ranks is None else ranks.size


def sequence_parallel_rank() -> int:
    """Return this rank's number among those."""
    ranks = current_ranks()
    return 0 if ranks is None else ranks.index


def sequence_parallel_group() -> Any:
    """Return their process group.

    Errors: KeyError where no sequence is divided, as DeepSpeed's callers expect it
    """
    ranks = current_ranks()
    if ranks is None:
        raise KeyError(
            "no sequence is divided between ranks, so there is no group of them; set sequence_parallel_size "
            "in "
            "the ds_config, and ask after initialize()"
        )
    return ranks.group


def sequence_data_parallel_group() -> Any:
    """Return the group of all ranks that share parameters with this one."""
    axis = sharers()
    return comm.get_world_group() if axis is None or axis.group is None else axis.group


def sequence_data_parallel_world_size() -> int:
    """Return how many ranks share parameters with this one."""
    axis = sharers()
    return dist.get_world_size() if axis is None else axis.size


def sequence_data_parallel_rank() -> int:
    """Return this rank's number among those."""
    axis = sharers()
    return dist.get_rank() if axis is None else axis.index

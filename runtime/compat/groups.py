"""Which ranks share what. Layers may be divided over neighbours; the others train on data of their own. No
sequence and no expert is divided between ranks.

Source: DeepSpeed 0.19.8 utils/groups.py: what its functions return without sequence or expert parallelism
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist

from ..errors import ConfigError
from ..mesh.current import current_axes, sharers, tensor_axis
from . import comm


def data_parallel_group() -> Any:
    """Return the group of the ranks that train the same parameters on data of their own.

    Errors: ConfigError before init_distributed()
    """
    axis = sharers()
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
    return 1


def sequence_parallel_rank() -> int:
    """Return this rank's number among those."""
    return 0


def sequence_parallel_group() -> NoReturn:
    """Refuse: there is none.

    Errors: KeyError, as DeepSpeed's callers expect it
    """
    raise KeyError(
        "no sequence is divided between ranks here, so there is no group of them; leave "
        "sequence parallelism out"
    )

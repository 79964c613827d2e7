"""Groups of ranks by what they share. Layers and sequences may be divided over neighbours, and experts over
ranks that train on data of their own.

Source: DeepSpeed 0.19.8 utils/groups.py
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..comm.mesh import ALONE, Axis
from ..errors import ConfigError
from ..mesh.current import current_axes, data_axis, expert_axes, sharers, tensor_axis
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
    """Return this rank's number among the data-parallel ranks."""
    return current_axes().coordinates(dist.get_rank())["dp"]


def broadcast_src_rank() -> int:
    """Return the rank whose parameters all others get."""
    return data_parallel_group_ranks()[0]


def model_parallel_world_size() -> int:
    """Return over how many ranks a layer is divided."""
    return current_axes().tp


def model_parallel_rank() -> int:
    """Return this rank's number among the model-parallel ranks."""
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
    """Return the first of the model-parallel ranks."""
    return current_axes().line_of(dist.get_rank(), ("tp",))[0]


def sequence_parallel_world_size() -> int:
    """Return among how many ranks a sequence is divided."""
    ranks = current_ranks()
    return 1 if ranks is None else ranks.size


def sequence_parallel_rank() -> int:
    """Return this rank's number among the sequence-parallel ranks."""
    ranks = current_ranks()
    return 0 if ranks is None else ranks.index


def sequence_parallel_group() -> Any:
    """Return their process group.

    Errors: KeyError where no sequence is divided, as DeepSpeed's callers expect it
    """
    ranks = current_ranks()
    if ranks is None:
        raise KeyError(
            "no sequence is divided between ranks, so there is no group of them; set "
            "sequence_parallel_size in the ds_config, and ask after initialize()"
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
    """Return this rank's number among the sequence-data-parallel ranks."""
    axis = sharers()
    return dist.get_rank() if axis is None else axis.index


def expert_parallel_group(group_name: str) -> Any:
    """Return the group of the ranks that hold all experts together; the name is as "ep_size_2".

    Errors: ConfigError before initialize() has made it
    """
    return _group_of(group_name, 0)


def expert_parallel_world_size(group_name: str) -> int:
    """Return the number of expert-parallel ranks."""
    return _axis_of(group_name, 0).size


def expert_parallel_rank(group_name: str) -> int:
    """Return this rank's number among the expert-parallel ranks."""
    return _axis_of(group_name, 0).index


def expert_data_parallel_group(group_name: str) -> Any:
    """Return the group of the ranks that hold the same experts.

    Errors: ConfigError before initialize() has made it, and where each expert is on one rank
    """
    return _group_of(group_name, 1)


def expert_data_parallel_world_size(group_name: str) -> int:
    """Return the number of expert-data-parallel ranks."""
    return _axis_of(group_name, 1).size


def expert_data_parallel_rank(group_name: str) -> int:
    """Return this rank's number among the expert-data-parallel ranks."""
    return _axis_of(group_name, 1).index


def largest_expert_size() -> int:
    """Return the largest number of ranks that hold all experts of a layer together."""
    return max((together.size for together, _ in expert_axes().values()), default=1)


def largest_expert_size_name() -> str:
    """Return the name of their group."""
    return f"ep_size_{largest_expert_size()}"


def _axis_of(group_name: str, which: int) -> Axis:
    if group_name == "ep_size_1":
        return (ALONE, sharers() or ALONE)[which]
    known = expert_axes()
    if group_name not in known:
        raise ConfigError(
            f"there is no group of experts {group_name!r}; there are "
            f"{', '.join(sorted(known)) or 'none before initialize()'}: MoE(ep_size=n) has 'ep_size_n'"
        )
    return known[group_name][which]


def _group_of(group_name: str, which: int) -> Any:
    axis = _axis_of(group_name, which)
    if axis.is_alone:
        raise ConfigError(
            f"the group of experts {group_name!r} has one rank along this axis, which has no process group; "
            "look at its world size before you ask for it"
        )
    return axis.group or comm.get_world_group()

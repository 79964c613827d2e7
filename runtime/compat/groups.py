"""Which ranks share what. All ranks train on data of their own, and no layer,
sequence or expert is divided between them.

Source: DeepSpeed 0.19.8 utils/groups.py: what its functions return without tensor,
        sequence or expert parallelism
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist

from . import comm


def data_parallel_group() -> Any:
    """Return the group of the ranks that train on data of their own: all.

    Errors: ConfigError before init_distributed()
    """
    return comm.get_world_group()


def data_parallel_group_ranks() -> list[int]:
    """Return the ranks that train on data of their own, in order: all."""
    return list(range(dist.get_world_size()))


def data_parallel_world_size() -> int:
    """Return how many ranks train on data of their own."""
    return dist.get_world_size()


def data_parallel_rank() -> int:
    """Return this rank's number among those."""
    return dist.get_rank()


def broadcast_src_rank() -> int:
    """Return the rank whose parameters all others get."""
    return 0


def model_parallel_world_size() -> int:
    """Return among how many ranks a layer is divided."""
    return 1


def model_parallel_rank() -> int:
    """Return this rank's number among those."""
    return 0


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

"""Status of a sharded parameter's values, and the names of the attributes that tell
DeepSpeed's callers about it.
"""

from __future__ import annotations

from enum import Enum

from torch import nn


class ZeroParamStatus(Enum):
    """Whether a parameter's values are here; DeepSpeed's names and numbers."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3  # DeepSpeed's; values that are on their way count as not available here


def detach(param: nn.Parameter) -> None:
    """Take the attributes away; nothing happens where there are none."""
    for name in NAMES:
        vars(param).pop(name, None)


NAMES = (
    "ds_id",
    "ds_shape",
    "ds_numel",
    "ds_tensor",
    "ds_status",
    "ds_persist",
    "ds_process_group",
    "ds_zero_partition_rank",
    "ds_zero_partition_world_size",
    "ds_active_sub_modules",
    "all_gather",
    "partition",
    "partition_numel",
    "ds_summary",
    "__getstate__",  # pickle asks for it
)

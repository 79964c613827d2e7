"""Agreement of all ranks, by value or by failure, before they wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError
from .wire import before_unwired


def agree(own: Mapping[str, object], *, what: str, cure: str) -> None:
    """Check that all ranks have been given the same values; keys are their names in a message.

    Order:  a collective of all ranks
    Errors: ConfigError, on all ranks, with what two of them were given
    """
    everywhere = _all_told({key: str(value) for key, value in own.items()})
    first = everywhere[0]
    for rank, other in enumerate(everywhere):
        key = next((key for key in first if other.get(key) != first[key]), None)
        if key is not None:
            raise ConfigError(
                f"rank {rank} and rank 0 were given different {what}: {key} is {other.get(key)} on rank "
                f"{rank} and {first[key]} on rank 0; {cure}"
            )


def fail_together(problem: str) -> None:
    """Raise the first problem that any rank has; "" where this one has none.

    Order:  a collective of all ranks
    Errors: ConfigError, on all ranks
    """
    first = next(filter(None, _all_told(problem)), "")
    if first:
        raise ConfigError(first)


def _all_told(own: Any) -> list[Any]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    before_unwired()
    dist.all_gather_object(everywhere, own)
    return everywhere

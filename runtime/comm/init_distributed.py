"""`init_distributed()`, as DeepSpeed has it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ..environment import read_environment
from ..errors import ConfigError
from .process_group import start_process_group


def init_distributed(  # noqa: PLR0913  (DeepSpeed's signature)
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make torch.distributed's default process group, unless there is one.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT come from the environment, where dslaunch puts
    them; without them this process is a job of its own. `auto_mpi_discovery`, `distributed_port`, `verbose`
    and `config` are accepted for DeepSpeed's callers and have no use here: the launcher sets these
    variables under MPI, too.
    Order:  every rank must call this
    Errors: ConfigError if dist_init_required is False and there is no process group
    """
    require_process_group(dist_init_required)
    start_process_group(
        read_environment(),
        backend=dist_backend,
        timeout=timeout,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
    )


def require_process_group(dist_init_required: bool | None) -> None:
    """See that there is a default process group where a program says that it has made one.

    Errors: ConfigError
    """
    if dist_init_required is False and not dist.is_initialized():
        raise ConfigError(
            "dist_init_required=False but torch.distributed has no process group; make one "
            "first, or leave it out"
        )

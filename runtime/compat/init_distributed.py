"""`init_distributed()` with DeepSpeed's arguments."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ..comm.process_group import start_process_group
from ..environment import read_environment
from ..errors import ConfigError, show_user_errors_in_one_line
from ..started import refusal


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

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT come from the environment, where dslaunch and
    torchrun put them. Without them a process that mpirun or srun has started joins its job, and these
    variables are set; with `auto_mpi_discovery=False` it is refused. Any other process is a job of its own.
    `distributed_port` is the port of a job that is joined, unless it is 29500 or MASTER_PORT is set.
    `verbose` and `config` are accepted for DeepSpeed's callers and have no use here.
    Order:  every rank must call this
    Errors: ConfigError if dist_init_required is False and there is no process group, or if a job of MPI or
            Slurm cannot be joined
    """
    show_user_errors_in_one_line()
    require_process_group(dist_init_required)
    worker = read_environment()
    says_nothing = init_method is None and rank < 0 and world_size < 0
    if worker.started is not None and says_nothing and not (auto_mpi_discovery or dist.is_initialized()):
        raise refusal(worker.started, "auto_mpi_discovery=False does not let it join")
    start_process_group(
        worker,
        backend=dist_backend,
        timeout=timeout,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        port=distributed_port,
    )


def require_process_group(dist_init_required: bool | None) -> None:
    """Check that there is a default process group where a program says that it has made one.

    Errors: ConfigError
    """
    if dist_init_required is False and not dist.is_initialized():
        raise ConfigError(
            "dist_init_required=False but torch.distributed has no process group; make one "
            "first, or leave it out"
        )

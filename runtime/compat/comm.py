"""Collectives for programs, as `import deepspeed.comm as dist` has them, over torch.distributed.

Groups, works and reduce ops are torch's own, and a group is left out for all ranks. What gloo has not in
every version of torch is put together from what it has (host_reduction.py). Every rank of a group must call
the same in the same order.
Source: DeepSpeed 0.19.8 comm/comm.py: its names, the order of arguments, their names and defaults
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..comm.collectives import reduce_scatter_single
from ..comm.comms_log import (
    configure as configure,
    get_comm_operation_count as get_comm_operation_count,
    get_logged_comm_ops as get_logged_comm_ops,
    has_comm_data as has_comm_data,
    log_summary as log_summary,
    reset_log as reset_log,
)
from ..comm.process_group import destroy_group, group_device, group_timeout
from ..comm.rank_group import all_gather_single
from ..comm.wire import before_unwired
from ..environment import read_environment
from ..errors import ConfigError
from . import host_reduction
from .host_reduction import Followed, Together, Work
from .init_distributed import init_distributed as init_distributed

Group = dist.ProcessGroup | None
ProcessGroup = dist.ProcessGroup
ReduceOp = dist.ReduceOp
_SUM: Any = dist.ReduceOp.SUM

# Names of DeepSpeed's module that are absent here, and what to do instead.
_ABSENT = (
    (
        "torch.distributed has the one back end, which init_distributed(dist_backend=...) chooses",
        "cdb nccl_backend mpi_backend ccl_backend hccl_backend TorchBackend set_backend "
        "init_deepspeed_backend",
    ),
    (
        "comms_logger in the ds_config or configure(enabled=True) times collectives, and log_summary() "
        "prints or returns the times",
        "comms_logger timers timer_summary timed_op get_debug_log_name get_default_args "
        "get_msg_size_from_args get_tensor_kwarg get_tensor_position",
    ),
    (
        "the launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, also under MPI and "
        "Slurm; call get_rank(), get_world_size() and get_local_rank()",
        "mpi_discovery in_aml in_aws_sm in_dlts patch_aml_env_for_torch_nccl_backend "
        "patch_aws_sm_env_for_torch_nccl_backend get_local_rank_from_launcher get_world_rank_from_launcher "
        "get_world_size_from_launcher",
    ),
    ("call all_reduce_coalesced() or all_gather_coalesced()", "has_coalescing_manager"),
    (
        "call torch.distributed._symmetric_memory.enable_symm_mem_for_group()",
        "enable_symm_mem_for_group",
    ),
)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _collective(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have this rank first take part in the forwards without gradients that others still run."""

    @wraps(call)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before_unwired()
        return call(*args, **kwargs)

    return called


# ---- groups ----


def is_available() -> bool:
    """Whether this torch can communicate."""
    return dist.is_available()


def is_initialized() -> bool:
    """Whether there is a default group."""
    return dist.is_initialized()


@_collective
def new_group(ranks: Sequence[int] | range) -> Any:
    """Make a group of these ranks, whose collectives may take as long as the default group's.

    All ranks of the job must call this.
    """
    return dist.new_group(list(ranks), timeout=group_timeout())


@_collective
def destroy_process_group(group: Group = None) -> None:
    """End this group, or all."""
    destroy_group(group)


def get_world_group() -> Any:
    """Return the group of all ranks."""
    if not dist.is_initialized():
        raise ConfigError("get_world_group(): there is no default group; call init_distributed() first")
    return dist.group.WORLD


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in the group; -1 if this rank is not one of them."""
    return dist.get_world_size(group)


def get_rank(group: Group = None) -> int:
    """Return this rank's number in the group; -1 if it is not in it."""
    return dist.get_rank(group)


def get_local_rank() -> int:
    """Return this rank's number on its host: LOCAL_RANK, or 0."""
    return read_environment().local_rank


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """Return the number in the job of the rank that the group calls `group_rank`.

    Errors: ValueError if the group has no such rank
    """
    return dist.get_global_rank(group or get_world_group(), group_rank)


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """Return the numbers in the job of the group's ranks, in the group's order."""
    return dist.get_process_group_ranks(group or get_world_group())


@_collective
def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """Return torch's mesh of all ranks."""
    return init_device_mesh(group_device().type, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


@_collective
def barrier(group: Group = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
    """Wait until all ranks of the group are here."""
    return dist.barrier(group=group, async_op=async_op, device_ids=device_ids)


@_collective
def monitored_barrier(
    group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks of the group are here; an error names those that are not. gloo only.

    Errors: RuntimeError after `timeout`, or the group's
    """
    dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)


# ---- one to all, all to one ----


@_collective
def broadcast(tensor: Tensor, src: int, group: Group = None, async_op: bool = False) -> Any:
    """Overwrite `tensor` on every rank with that of rank `src`, a number in the job."""
    return dist.broadcast(tensor, src=src, group=group, async_op=async_op)


@_collective
def broadcast_object_list(
    object_list: list[Any], src: int, group: Group = None, device: torch.device | None = None
) -> None:
    """Overwrite the list's objects on every rank with copies of those of rank `src`, by pickle."""
    dist.broadcast_object_list(object_list, src=src, group=group, device=device)


@_collective
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Fill rank `dst`'s list, which others leave out, with every rank's tensor."""
    return dist.gather(tensor, gather_list, dst=dst, group=group, async_op=async_op)


@_collective
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Fill every rank's tensor with its one of rank `src`'s list, which others leave out."""
    return dist.scatter(tensor, scatter_list, src=src, group=group, async_op=async_op)


@_collective
def reduce(tensor: Tensor, dst: int, op: Any = _SUM, group: Group = None, async_op: bool = False) -> Any:
    """Reduce `tensor` over the group; only rank `dst`'s is meaningful afterwards."""
    if not host_reduction.is_average(op, tensor, group):
        return dist.reduce(tensor, dst=dst, op=op, group=group, async_op=async_op)
    work = dist.reduce(tensor, dst=dst, op=_SUM, group=group, async_op=async_op)
    return _followed(work, _divide(tensor, group), async_op=async_op)


# ---- all to all ----


@_collective
def all_reduce(tensor: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False) -> Any:
    """Reduce `tensor` over the group, in place, on all ranks."""
    if not host_reduction.is_average(op, tensor, group):
        return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    work = dist.all_reduce(tensor, op=_SUM, group=group, async_op=async_op)
    return _followed(work, _divide(tensor, group), async_op=async_op)


def inference_all_reduce(tensor: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False) -> Any:
    """`all_reduce`: there is no faster one for small tensors here."""
    return all_reduce(tensor, op, group, async_op)


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = _SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce each of these over the group, in place; all are sent before any is waited for."""
    return _together([all_reduce(one, op, group, async_op=True) for one in tensors], async_op=async_op)


@_collective
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Any = _SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce `input_list[r]` of all ranks into rank r's `output`.

    Errors: ConfigError if they do not fit each other
    """
    if host_reduction.is_torchs(output, group):
        return dist.reduce_scatter(output, list(input_list), op=op, group=group, async_op=async_op)
    work = host_reduction.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
    return work if async_op else None


@_collective
def reduce_scatter_tensor(
    output_tensor: Tensor, tensor: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce `tensor` over the group; rank r's `output_tensor` is the r-th of its equal parts.

    Shapes: `output_tensor` [n, ...], `tensor` [ranks * n, ...]
    """
    if host_reduction.is_torchs(output_tensor, group):
        return reduce_scatter_single(output_tensor, tensor, op=op, group=group, async_op=async_op)
    size = dist.get_world_size(group)
    if tensor.numel() != size * output_tensor.numel():
        raise ConfigError(
            f"reduce_scatter_tensor() of {tensor.numel()} elements into {output_tensor.numel()}: must be as "
            f"many for each of the {size} ranks"
        )
    parts = [part.view(output_tensor.shape) for part in tensor.reshape(-1).chunk(size)]
    return reduce_scatter(output_tensor, parts, op, group, async_op)


def reduce_scatter_fn(
    output_tensor: Tensor, tensor: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False
) -> Any:
    """`reduce_scatter_tensor`, which torch has."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def has_reduce_scatter_tensor() -> bool:
    """Return True: `reduce_scatter_tensor` works."""
    return True


@_collective
def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False) -> Any:
    """Fill the list with every rank's tensor, in rank order."""
    return dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)


@_collective
def all_gather_into_tensor(
    output_tensor: Tensor, tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Fill `output_tensor` with every rank's tensor, in rank order.

    Shapes: `output_tensor` [ranks * n, ...] or [ranks, n, ...], `tensor` [n, ...]
    """
    if not tensor.is_cuda:  # gloo wants [ranks * n, ...]
        output_tensor, tensor = output_tensor.view(-1), tensor.reshape(-1)
    return all_gather_single(output_tensor, tensor, group=group, async_op=async_op)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """`all_gather_into_tensor`, which torch has."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def has_all_gather_into_tensor() -> bool:
    """Return True: `all_gather_into_tensor` works."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Return True: `all_reduce_coalesced` works."""
    return True


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """`all_gather_into_tensor` of each pair; all are sent before any is waited for."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = [all_gather_into_tensor(output, own, group, async_op=True) for output, own in pairs]
    return _together(works, async_op=async_op)


@_collective
def all_gather_object(object_list: list[Any], obj: object, group: Group = None) -> None:
    """Fill the list with a copy of every rank's object, in rank order, by pickle."""
    dist.all_gather_object(object_list, obj, group=group)


@_collective
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Send each rank its part of `tensor`, and put what comes from each into its part of `output`; equal
    parts, or these sizes.
    """
    return dist.all_to_all_single(
        output, tensor, output_split_sizes, input_split_sizes, group=group, async_op=async_op
    )


@_collective
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Send each rank its tensor of `input_tensor_list`, and fill the other list with what comes from each."""
    if not output_tensor_list or host_reduction.is_torchs(output_tensor_list[0], group):
        return dist.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)
    work = host_reduction.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)
    return work if async_op else None


# ---- one to one ----


@_collective
def send(tensor: Tensor, dst: int, group: Group = None, tag: int = 0) -> None:
    """Send the tensor to rank `dst`, a number in the job."""
    dist.send(tensor, dst, group=group, tag=tag)


@_collective
def recv(tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> int:
    """Fill it with what rank `src` sends, by default the first rank that sends; return the sender."""
    return dist.recv(tensor, src, group=group, tag=tag)


@_collective
def isend(tensor: Tensor, dst: int, group: Group = None, tag: int = 0) -> Any:
    """Begin to send; the returned work tells when it is done."""
    return dist.isend(tensor, dst, group=group, tag=tag)


@_collective
def irecv(tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> Any:
    """Begin to receive; the returned work tells when it is done."""
    return dist.irecv(tensor, src, group=group, tag=tag)


class P2POp:
    """A send or receive for `batch_isend_irecv`; `op` is `isend` or `irecv`, of this module or torch's."""

    def __init__(
        self, op: Callable[..., Any], tensor: Tensor, peer: int, group: Group = None, tag: int = 0
    ) -> None:
        if op not in (isend, irecv, dist.isend, dist.irecv):
            raise ConfigError(f"P2POp(op={op!r}): must be isend or irecv")
        self.op = "isend" if op in (isend, dist.isend) else "irecv"
        self.tensor, self.peer, self.group, self.tag = tensor, peer, group, tag


@_collective
def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Any]:
    """Begin all of these operations; return their works."""
    return dist.batch_isend_irecv(
        [
            dist.P2POp(getattr(dist, one.op), one.tensor, one.peer, group=one.group, tag=one.tag)
            for one in p2p_op_list
        ]
    )


def _divide(tensor: Tensor, group: Group) -> Callable[[], None]:
    size = dist.get_world_size(group)

    @torch.no_grad()
    def divide() -> None:
        tensor.div_(size)

    return divide


def _followed(work: dist.Work | None, finish: Callable[[], None], *, async_op: bool) -> Followed | None:
    followed = Followed(work, finish)
    return followed if async_op else None


def _together(works: Sequence[Work], *, async_op: bool) -> Together | None:
    together = Together(works)
    if async_op:
        return together
    together.wait()
    return None


if not TYPE_CHECKING:  # a type checker would believe that there is every name

    def __getattr__(name: str) -> NoReturn:
        """Say of a name of DeepSpeed's module that is absent what to do instead."""
        advice = next((advice for advice, names in _ABSENT if name in names.split()), None)
        if advice is not None:
            raise AttributeError(f"dslaunch.comm.{name}: DeepSpeed's own collectives are not here; {advice}")
        raise AttributeError(
            f"module 'dslaunch.comm' has no attribute {name!r}; docs/reference/api.md lists what it has"
        )

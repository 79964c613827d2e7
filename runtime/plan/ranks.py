"""A process group whose other ranks do what this one does: collectives cost bytes and no time."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import process_group
from .streams import PlannedStream, current_stream

_NAME = "dslaunch_plan"


class EndedWork(dist.Work):
    """A collective that has ended. On a GPU the host does not know that at once."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self._tensors = result
        self._event = current_stream().record_event() if torch.cuda.is_available() else None

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Tell whether the host knows that it has."""
        return self._event is None or bool(self._event.query())

    def is_success(self) -> bool:
        """Return that it has."""
        return True

    def exception(self) -> None:
        """Return none."""

    def result(self) -> Any:
        """Return the tensors that it filled."""
        return self._tensors

    def get_future(self) -> Any:
        """Return a future that is done."""
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class MessageWork(EndedWork):
    """A message to or from one rank, beside the other work of this one: its end is known once that was waited
    for.
    """

    def __init__(self, tensors: list[Tensor], stream: PlannedStream) -> None:
        dist.Work.__init__(self)
        self._tensors, self._was_awaited = tensors, False
        stream.wait_stream(current_stream())
        self._end = stream.record_event()

    def wait(self, timeout: Any = None) -> bool:
        """Let what comes later wait for it."""
        current_stream().wait_event(self._end)
        self._was_awaited = True
        return True

    def is_completed(self) -> bool:
        """Tell whether the host knows that it has ended."""
        return bool(self._end.is_known) if torch.cuda.is_available() else self._was_awaited


_ProcessGroup: Any = dist.ProcessGroup


class AlikeRanks(_ProcessGroup):  # type: ignore[misc]
    """This rank among others that have the same values."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own, self._num_ranks = rank, size
        self._messages = PlannedStream()

    def getBackendName(self) -> str:
        """Return the name that torch knows it by."""
        return _NAME

    @property
    def group_name(self) -> str:
        """Return the name that torch gave it."""
        return getattr(self, "_name", "planned")

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> AlikeRanks:
        return self

    @property
    def bound_device_id(self) -> None:
        """Return none: groups are not split."""
        return None

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> EndedWork:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        if op == dist.ReduceOp.SUM:
            for one in tensors:
                one.mul_(self._num_ranks) if one.dtype is not torch.bool else None
        return EndedWork(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> EndedWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> EndedWork:
        return EndedWork(tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> EndedWork:
        return self.allreduce(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> EndedWork:
        for filled, own in zip(outputs, inputs, strict=True):
            if _are_one_run(filled):
                whole = torch.as_strided(filled[0], (len(filled), own.numel()), (own.numel(), 1))
                whole.copy_(own.reshape(1, -1))
                continue
            for one in filled:
                one.copy_(own)
        return EndedWork(outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> EndedWork:
        output.view(self._num_ranks, -1).copy_(own.reshape(1, -1))
        return EndedWork([output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> EndedWork:
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return EndedWork(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> EndedWork:
        return self.allgather(outputs, inputs) if outputs else EndedWork()

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> EndedWork:
        for output, parts in zip(outputs, inputs, strict=False):
            output.copy_(parts[self._own])
        return EndedWork(outputs)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> EndedWork:
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[self._own])
        return self.allreduce(outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, own: Tensor, opts: Any = None) -> EndedWork:
        output.reshape(-1).copy_(own.reshape(-1).chunk(self._num_ranks)[self._own])
        return self.allreduce([output], opts)

    def alltoall_base(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> EndedWork:
        parts = torch.split(own, input_sizes) if input_sizes else own.chunk(self._num_ranks)
        filled = torch.split(output, output_sizes) if output_sizes else output.chunk(self._num_ranks)
        mine = parts[self._own]
        for one in filled:
            if one.shape == mine.shape:
                one.copy_(mine)
        return EndedWork([output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> EndedWork:
        for one in outputs:
            if one.shape == inputs[self._own].shape:
                one.copy_(inputs[self._own])
        return EndedWork(outputs)

    # the names that torch 2.13 gave them
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> EndedWork:
        for output, own in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, own, opts)
        return EndedWork(outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> EndedWork:
        return EndedWork()

    def barrier(self, opts: Any = None) -> EndedWork:
        return EndedWork()

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> EndedWork:
        return MessageWork(tensors, self._messages)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> EndedWork:
        return MessageWork(tensors, self._messages)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> EndedWork:
        return MessageWork(tensors, self._messages)

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        pass


def _are_one_run(tensors: list[Tensor]) -> bool:
    """Whether the tensors follow one another in memory: one operation fills them all."""
    first, last = tensors[0], tensors[-1]
    distance = (len(tensors) - 1) * first.numel()
    return (
        first.is_contiguous()
        and first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        and last.storage_offset() - first.storage_offset() == distance
        and last.shape == first.shape
    )


def join_alike_ranks(*, rank: int, size: int, backend: str) -> None:
    """Have every process group of this process be one of alike ranks, which says that it is `backend`."""
    c10d: Any = dist.distributed_c10d

    def create(*args: Any, **kwargs: Any) -> AlikeRanks:
        _, number, num_ranks, _ = args
        return AlikeRanks(number, num_ranks)

    devices = ["cpu", "cuda"]
    dist.Backend.register_backend(_NAME, create, devices=devices)
    init, new = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        init(_NAME, store=dist.HashStore(), rank=rank, world_size=size)  # type: ignore[attr-defined]

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new(ranks, backend=_NAME, group_desc=kwargs.get("group_desc"))

    def config(group: Any = None) -> str:
        return f"cpu:{backend},cuda:{backend}"

    # Arguments have torch's names: programs, and torch.distributed.checkpoint, call them by these.
    def fill(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [pickle.loads(pickle.dumps(obj))] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            fill(object_gather_list, obj)

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        if scatter_object_input_list is not None:
            scatter_object_output_list[0] = scatter_object_input_list[0]

    patched: dict[str, Callable[..., Any]] = {
        "all_gather_object": fill,
        "gather_object": gather_object,
        "scatter_object_list": scatter_object_list,
        "broadcast_object_list": lambda *_, **__: None,
        "init_process_group": init_process_group,
        "new_group": new_group,
        "get_backend": lambda group=None: backend,
        "get_backend_config": config,
        "is_nccl_available": lambda: True,
    }
    replaced: Any = process_group
    replaced.wait_for_rank_0 = lambda rank, world_size: None  # it does not run
    for name, value in patched.items():
        setattr(dist, name, value)
        setattr(c10d, name, value)

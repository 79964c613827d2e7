"""The back end "nccl" for the fake device: gloo sends what is on the host, and the results arrive later, on
a stream of the group's.

What is as with NCCL: `wait()` makes the current stream wait and not the host, so that a work is completed
only when the host has waited for the device; a work keeps its outputs alive; sums of 16 bits are rounded at
each of the ring's hops, and a reduce_scatter and an all_reduce add in different orders.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from .functional import Collectives
from .message_queue import Asked, MessageQueue
from .standstill import Barriers, Board

_C10D = torch._C._distributed_c10d
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SUPPORTED = (*_FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)
_OF_ALL = ""  # a group's stream for collectives, batches, and messages where it is bound to a device
_Host = list[Tensor]


class Place(NamedTuple):
    """Where a group is among others."""

    board: Board
    name: str  # the same on all its ranks
    ranks: tuple[int, ...]  # as they are called in the job


def _stop(streams: dict[str, MessageQueue]) -> None:
    while streams:
        streams.popitem()[1].stop()


class Work(_C10D.Work):  # type: ignore[name-defined, misc]
    """One collective; `outputs` live as long as it does."""

    def __init__(self, native: Any, stream: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """`stream` has been told to do it."""
        super().__init__()
        self._native, self._event = native, native.record(stream)
        self._device = native.device_of_stream(stream)
        self._inputs: Sequence[Tensor] = tuple(inputs)
        self.outputs = tuple(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream come after it."""
        self._native.block(self._event, self._native.get_stream(self._device))
        self._inputs = ()
        return True

    def is_completed(self) -> bool:
        """Whether the host has waited for something that came after it."""
        return bool(self._native.is_known_done(self._event))

    def is_success(self) -> bool:
        """As every work."""
        return True

    def exception(self) -> None:
        """There is none."""

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()


class MessageWork(Work):
    """Messages that run together. What is received is on the device from the first wait on: the other side
    may send it after what this one sends in turn.
    """

    def __init__(
        self, native: Any, messages: MessageQueue, asked: Sequence[Asked], inputs: Sequence[Tensor]
    ) -> None:
        targets = [one.target for one in asked if one.target is not None]
        super().__init__(native, messages.stream, inputs, targets)
        self._messages, self._unit = messages, messages.issue(asked)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the host wait until they are over, and let the current stream come after them."""
        self._messages.finish(self._unit)
        return super().wait(timeout)


class Options:
    """What torch and programs set and read of NCCL's."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.group_name = ""
        self.global_ranks_in_group: list[int] = []
        self.config = types.SimpleNamespace()


class ProcessGroupNCCL(dist.ProcessGroup):
    """One communicator, on the device that is current when it is first used."""

    Options = Options
    native: Any = None  # the device; see install()
    functional: Collectives
    alive: ClassVar[weakref.WeakSet[ProcessGroupNCCL]] = weakref.WeakSet()

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self.options = options
        self._store = store
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._streams: dict[str, int] = {}
        self._messages: dict[str, MessageQueue] = {}  # by stream
        self._barriers: Barriers | None = None
        self._batch: list[tuple[Asked, Tensor]] | None = None
        self._num_splits = 0
        self._has_cpu = False
        self._place = Place(Board(store, rank, size), "all ranks", tuple(range(size)))
        self.alive.add(self)
        weakref.finalize(self, _stop, self._messages)

    # What torch asks of a group or of its back ends.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda"), *([torch.device("cpu")] if self._has_cpu else [])]

    def _get_backend(self, device: torch.device) -> Any:
        return self if torch.device(device).type == "cuda" else self._gloo

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    def getBackendName(self) -> str:
        """As torch names it."""
        return "nccl"

    def name(self) -> str:
        """As torch names it."""
        return "nccl"

    def setGroupName(self, name: str) -> None:
        """As torch calls it."""
        self._name = name

    def getGroupName(self) -> str:
        """As torch calls it."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """As torch calls it."""
        self._description = description

    def getGroupDesc(self) -> str:
        """As torch calls it."""
        return self._description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Of all that comes."""
        self.options._timeout = timeout

    def eager_connect_single_device(self, device: torch.device) -> None:
        """As torch calls it of a group that is bound to a device."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """As torch calls it where others make a group."""

    def get_group_store(self) -> Any:
        """As torch calls it."""
        return self._store

    def split_group(
        self, ranks: Sequence[int], *, timeout: timedelta, group_name: str, group_desc: str, **_: Any
    ) -> ProcessGroupNCCL | None:
        """One call of all ranks makes all groups: those that give the same ranks are one. Their names may
        differ: torch makes them of how many groups a rank is in.
        """
        self._num_splits += 1
        if self.rank() not in ranks:
            return None
        options = Options()
        options._timeout = timeout
        store = dist.PrefixStore(f"split {self._num_splits} {[*ranks]}", self._store)
        made = ProcessGroupNCCL(store, list(ranks).index(self.rank()), len(ranks), options)
        made.setGroupName(group_name)
        made.setGroupDesc(group_desc)
        made._has_cpu = self._has_cpu
        members = tuple(self._place.ranks[rank] for rank in ranks)
        made._place = Place(self._place.board, f"{self._place.name}/{self._num_splits}", members)
        return made

    def shutdown(self) -> None:
        """Gloo's threads end with the group."""
        _stop(self._messages)

    def abort(self) -> None:
        """As shutdown."""

    # Collectives.

    def _run(
        self, what: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], send: Callable[[_Host], _Host]
    ) -> Any:
        """Have `send` make the outputs' values of the inputs', which it gets as they are when the group's
        stream comes to them.
        """
        native = self.native
        stream = self._begin(what, (*inputs, *outputs))
        if _OF_ALL in self._messages:
            self._messages[_OF_ALL].finish()
        values = send([native.take(tensor.detach(), stream, what) for tensor in inputs])
        for tensor, value in zip(outputs, values, strict=True):
            native.land(tensor.detach(), value.view(tensor.shape), stream, what)
        return Work(native, stream, inputs, outputs)

    def _begin(self, what: str, tensors: Sequence[Tensor], key: str = _OF_ALL) -> int:
        """Return the stream of that name, which comes after what this rank's current one was told."""
        native = self.native
        for tensor in tensors:
            if tensor.dtype not in _SUPPORTED:
                raise RuntimeError(f"Unconvertible NCCL type {tensor.dtype}")
            if not tensor.is_cuda:
                raise RuntimeError(
                    f"No backend type associated with device type {tensor.device.type}: NCCL's are CUDA's"
                )
            if not tensor.is_contiguous():
                raise RuntimeError("Tensors must be contiguous")
        device = tensors[0].get_device() if tensors else native.get_device()
        if key not in self._streams:
            self._streams[key] = native.new_stream(device)
        native.block(native.record(native.get_stream(device)), self._streams[key])
        return self._streams[key]

    def _all(self, host: Tensor) -> list[Tensor]:
        """Every rank's."""
        gathered = [torch.empty_like(host) for _ in range(self.size())]
        self._gloo.allgather([gathered], [host.contiguous()]).wait()
        return gathered

    def _reduced(self, values: Sequence[Tensor], op: Any) -> Tensor:
        """In the order of `values`, rounded at each hop."""
        kind = getattr(op, "op", op)
        total = values[0].clone()
        if kind == dist.ReduceOp.AVG:
            values = [value / self.size() for value in values]
            total = values[0].clone()
        for value in values[1:]:
            if kind == dist.ReduceOp.MAX:
                total = torch.maximum(total, value)
            elif kind == dist.ReduceOp.MIN:
                total = torch.minimum(total, value)
            elif kind == dist.ReduceOp.PRODUCT:
                total = total * value
            else:
                total = total + value
        return total

    def _around(self, values: list[Tensor], last: int) -> list[Tensor]:
        """As the ring passes a chunk on, which ends at the rank whose it is."""
        first = (last + 1) % self.size()
        return values[first:] + values[:first]

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """In rank order, as the tree does for what is small."""
        if not tensors[0].is_cuda:
            return self._gloo.allreduce(list(tensors), opts)
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._run(
            "all_reduce", tensors, tensors, lambda host: [self._reduced(self._all(one), op) for one in host]
        )

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """As allreduce."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        """As allreduce, on one rank."""
        if not tensors[0].is_cuda:
            return self._gloo.reduce(list(tensors), opts)

        def send(host: _Host) -> _Host:
            total = self._reduced(self._all(host[0]), opts.reduceOp)
            return [total if self.rank() == opts.rootRank else host[0]]

        return self._run("reduce", tensors, tensors, send)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        """From one rank."""
        if not tensors[0].is_cuda:
            return self._gloo.broadcast(list(tensors), opts)
        return self._run("broadcast", tensors, tensors, lambda host: [self._all(host[0])[opts.rootRank]])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        """One after the other, in rank order."""
        if not output.is_cuda:
            return self._gloo._allgather_base(output, given)
        return self._run(
            "all_gather",
            [given],
            [output],
            lambda host: [torch.cat([one.reshape(-1) for one in self._all(host[0])])],
        )

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> Any:
        """Around the ring."""
        if not output.is_cuda:
            return self._gloo._reduce_scatter_base(output, given, opts)

        def send(host: _Host) -> _Host:
            chunks = [one.reshape(-1).chunk(self.size())[self.rank()] for one in self._all(host[0])]
            return [self._reduced(self._around(chunks, self.rank()), opts.reduceOp)]

        return self._run("reduce_scatter", [given], [output], send)

    _reduce_scatter_base = reduce_scatter_single

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """Into a list."""
        if not given[0].is_cuda:
            return self._gloo.allgather([list(one) for one in outputs], list(given))
        return self._run("all_gather", given, outputs[0], lambda host: self._all(host[0]))

    def gather(self, outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor], opts: Any) -> Any:
        """On one rank."""
        if not given[0].is_cuda:
            return self._gloo.gather([list(one) for one in outputs], list(given), opts)
        into = outputs[0] if outputs else []
        return self._run(
            "gather",
            given,
            into,
            lambda host: self._all(host[0]) if len(into) else (self._all(host[0]), [])[1],
        )

    def scatter(self, outputs: Sequence[Tensor], given: Sequence[Sequence[Tensor]], opts: Any) -> Any:
        """From one rank."""
        if not outputs[0].is_cuda:
            return self._gloo.scatter(list(outputs), [list(one) for one in given], opts)
        sent = list(given[0]) if given else []

        def send(host: _Host) -> _Host:
            own = (
                torch.stack(host)
                if host
                else torch.empty(self.size(), *outputs[0].shape, dtype=outputs[0].dtype)
            )
            return [self._all(own)[opts.rootRank][self.rank()]]

        return self._run("scatter", sent, outputs, send)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        """Rows, as many to each rank as the sizes say; alike for all without sizes."""
        if not given.is_cuda:
            return self._gloo.alltoall_base(output, given, output_sizes, input_sizes)

        def send(host: _Host) -> _Host:
            into = torch.empty(output.shape, dtype=output.dtype)
            self._gloo.alltoall_base(into, host[0], list(output_sizes), list(input_sizes)).wait()
            return [into]

        return self._run("all_to_all", [given], [output], send)

    alltoall_base = all_to_all_single

    # Messages.

    def send(self, tensors: Sequence[Tensor], target: int, tag: int = 0) -> Any:
        """To one rank."""
        if not tensors[0].is_cuda:
            return self._gloo.send(list(tensors), target, tag)
        return self._ask(tensors[0], target, is_send=True)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Any:
        """From one rank."""
        if not tensors[0].is_cuda:
            return self._gloo.recv(list(tensors), source, tag)
        return self._ask(tensors[0], source, is_send=False)

    def _ask(self, tensor: Tensor, peer: int, *, is_send: bool) -> Any:
        native, key = self.native, self._stream_with(peer)
        what = "send" if is_send else "recv"
        stream = self._begin(what, [tensor], key)
        if is_send:
            asked = Asked(True, peer, native.take(tensor.detach(), stream, what))
        else:
            native.promise(tensor.detach(), stream, what)
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            asked = Asked(False, peer, value, tensor)
        if self._batch is None:
            return self._issue(key, [(asked, tensor)])
        self._batch.append((asked, tensor))
        return None

    def _stream_with(self, peer: int) -> str:
        """Return the name of the stream of messages with that rank. One for all where the group is bound to a
        device, as torch has it, and for a batch; else one for each two ranks.
        """
        if self._batch is not None or self.bound_device_id is not None:
            return _OF_ALL
        return f"{min(self.rank(), peer)} and {max(self.rank(), peer)}"

    def _issue(self, key: str, asked: Sequence[tuple[Asked, Tensor]]) -> MessageWork:
        stream, (board, name, ranks) = self._streams[key], self._place
        if key not in self._messages:
            own = f"{name} {key}".rstrip()
            self._messages[key] = MessageQueue(self.native, stream, self._gloo, board, name=own, ranks=ranks)
        inputs = [tensor for one, tensor in asked if one.is_send]
        return MessageWork(self.native, self._messages[key], [one for one, _ in asked], inputs)

    def _start_coalescing(self, device: torch.device) -> None:
        """Keep messages until the batch is whole. Collectives begin at once."""
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """Begin with the batch."""
        batch, self._batch = self._batch, None
        if batch:
            return self._issue(_OF_ALL, batch)
        stream = self._begin("batch", ())
        return Work(self.native, stream, (), ())

    def finish_messages(self) -> None:
        """Have the host wait for all."""
        for one in [*self._messages.values()]:
            one.finish()

    def barrier(self, opts: Any = None) -> Any:
        """As NCCL's, which blocks the host."""
        if _OF_ALL in self._messages:
            self._messages[_OF_ALL].finish()
        self._barriers = self._barriers or Barriers(*self._place)
        with self._barriers.wait():
            self._gloo.barrier().wait()
        return Work(self.native, self.native.get_stream(self.native.get_device()), (), ())


def install(native: Any) -> None:
    """Have torch.distributed believe that it was built with NCCL."""
    ProcessGroupNCCL.native = native
    c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined, misc]
    dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined, misc]
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)  # type: ignore[attr-defined]
    torch.cuda.nccl.version = lambda: (2, 0, 0)  # type: ignore[assignment]
    make, batch = c10d._new_process_group_helper, c10d.batch_isend_irecv
    synchronize = torch._C._cuda_synchronize

    def with_options(*args: Any, **more: Any) -> Any:
        made = make(*args, **more)
        group = made[0]
        if isinstance(group, ProcessGroupNCCL):
            group._has_cpu = "gloo" in str(args[3] if len(args) > 3 else more.get("backend"))
            if more.get("device_id") is not None:
                group.bound_device_id = more["device_id"]
            if dist.is_initialized():
                place = getattr(c10d._get_default_group(), "_place", None)
                board = (
                    Board(args[4], dist.get_rank(), dist.get_world_size()) if place is None else place.board
                )
                group._place = Place(board, group.getGroupName(), tuple(args[2]) or tuple(range(board.size)))
        return made

    def as_one(operations: list[Any]) -> list[Any]:
        group = operations[0].group or c10d._get_default_group()
        device = operations[0].tensor.device
        if not isinstance(group, ProcessGroupNCCL) or device.type != "cuda":
            return batch(operations)
        c10d._check_p2p_op_list(operations)
        with c10d._coalescing_manager(group, device, async_ops=True) as manager:
            for one in operations:
                side = "group_dst" if one.op is c10d.isend else "group_src"
                one.op(one.tensor, group=group, **{side: one.group_peer})
        return list(manager.works)

    def synchronize_all() -> None:
        for group in [*ProcessGroupNCCL.alive]:
            group.finish_messages()
        synchronize()

    c10d._new_process_group_helper = with_options
    c10d.batch_isend_irecv = dist.batch_isend_irecv = as_one
    torch._C._cuda_synchronize = synchronize_all
    ProcessGroupNCCL.functional = Collectives()
    ProcessGroupNCCL.functional.install()

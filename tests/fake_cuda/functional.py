"""torch's functional collectives, which DTensors call, for groups of the fake device: torch's own look for a
back end in C++.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor


class Collectives:
    """Each is begun when it is called, and is waited for when its result is."""

    def __init__(self) -> None:
        self._works: dict[int, Any] = {}  # by the address of the result
        self._library = torch.library.Library("_c10d_functional", "IMPL")

    def install(self) -> None:
        """Have torch call them for tensors on the device."""
        for one in (
            self.all_reduce, self.all_reduce_, self.all_gather_into_tensor, self.reduce_scatter_tensor,
            self.all_to_all_single, self.broadcast, self.broadcast_, self.wait_tensor,
        ):  # fmt: skip
            self._library.impl(one.__name__, one, "CUDA")

    def all_reduce(self, given: Tensor, op: str, group: Any) -> Tensor:
        """As torch's."""
        return self.all_reduce_(given.contiguous().clone(), op, group)

    def all_reduce_(self, given: Tensor, op: str, group: Any) -> Tensor:
        """As torch's."""
        options = dist.AllreduceOptions()
        options.reduceOp = _op(op)
        return self._begun(given, _group(group).allreduce([given], options))

    def all_gather_into_tensor(self, given: Tensor, size: int, group: Any) -> Tensor:
        """As torch's."""
        into = given.new_empty((given.shape[0] * size, *given.shape[1:]))
        return self._begun(into, _group(group).all_gather_single(into, given.contiguous()))

    def reduce_scatter_tensor(self, given: Tensor, op: str, size: int, group: Any) -> Tensor:
        """As torch's."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = _op(op)
        into = given.new_empty((given.shape[0] // size, *given.shape[1:]))
        return self._begun(into, _group(group).reduce_scatter_single(into, given.contiguous(), options))

    def all_to_all_single(self, given: Tensor, to: list[int], of: list[int], group: Any) -> Tensor:
        """As torch's."""
        into = given.new_empty((sum(to), *given.shape[1:]))
        return self._begun(into, _group(group).all_to_all_single(into, given.contiguous(), to, of))

    def broadcast(self, given: Tensor, source: int, group: Any) -> Tensor:
        """As torch's."""
        return self.broadcast_(given.contiguous().clone(), source, group)

    def broadcast_(self, given: Tensor, source: int, group: Any) -> Tensor:
        """As torch's."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._begun(given, _group(group).broadcast([given], options))

    def wait_tensor(self, given: Tensor) -> Tensor:
        """As torch's."""
        work = self._works.pop(given.untyped_storage().data_ptr(), None)
        if work is not None:
            work.wait()
        return given

    def _begun(self, into: Tensor, work: Any) -> Tensor:
        self._works[into.untyped_storage().data_ptr()] = work
        return into


def _op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _group(given: Any) -> Any:
    return c10d._resolve_process_group(given) if isinstance(given, str) else given

"""The most bytes that training holds at one time, on the device and in host memory apart,
found by looking at every storage.

Both are the CPU's here, so nothing about a storage says which of the two it is for. What the engine has put
into host memory is found by walking its objects: masters, states, shards of parameters and of gradients that
its plan places there, all memory that files are read into, and what an optimizer step has on its way between
the two. Whatever else is alive is the device's: parameters, flat buffers, activations, what a collective
needs, and what the test itself has made since the census began.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dslaunch.runtime.step import pipeline
from dslaunch.runtime.zero.gradients.sharded_gradients import HostGradients

LET_GO_S = 2.0


class Bytes(NamedTuple):
    device: int
    host: int


class Census(TorchDispatchMode):
    """Looks after every operation of torch, and keeps the most of each of the two. Of tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}
        self._engine: weakref.ref[Any] | None = None
        self._on_their_way: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self._allowed = inf
        self.most = Bytes(0, 0)

    def watch(self, engine: Any, *, allowed: float = inf) -> None:
        """Begin to tell apart, and to keep the most.

        gloo's threads let go of a finished collective's tensors a moment late: more than `allowed` on the
        device is looked at again.
        """
        self._engine = weakref.ref(engine)
        self._allowed = allowed
        self.most = Bytes(0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self._seen[one.untyped_storage()._cdata] = StorageWeakRef(one.untyped_storage())
        if self._engine is not None:
            now, deadline = self.look(), time.monotonic() + LET_GO_S
            while now.device > self._allowed and time.monotonic() < deadline:
                time.sleep(LET_GO_S / 1000)
                now = self.look()
            if now.device > self._allowed:
                self._allowed = inf  # nothing lets go of it
            self.most = Bytes(max(self.most.device, now.device), max(self.most.host, now.host))
        return result

    def look(self) -> Bytes:
        self._seen = {place: ref for place, ref in self._seen.items() if not ref.expired()}
        live = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._seen.values()]
        sizes = {one.data_ptr(): one.nbytes() for one in live if one is not None and one.nbytes()}
        hosts = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in self._on_host()}
        engine = None if self._engine is None else self._engine()
        for folder in () if engine is None else engine._offload._folders.values():
            hosts.update(folder.memory)
        return Bytes(sum(size for place, size in sizes.items() if place not in hosts), sum(hosts.values()))

    def _on_host(self) -> Iterator[Tensor]:
        engine = None if self._engine is None else self._engine()
        if engine is None:
            return
        for sub_buffer in (sub_buffer for unit in engine._model.units for sub_buffer in unit.sub_buffers):
            if sub_buffer.residence.steps_on_host:
                yield from sub_buffer.optimizer_shard._stored().values()
            if sub_buffer.residence.params_on_host:
                yield sub_buffer.param_shard.kept
            gradients = sub_buffer._gradients
            if isinstance(gradients, HostGradients):
                yield gradients._shard
                if gradients._landed is not None:
                    yield gradients._landed
        yield from self._on_their_way

    @contextmanager
    def of_steps(self) -> Iterator[None]:
        """See what a step has on its way."""
        turn = pipeline.Turn
        arrive, start_copy = turn.arrive, turn._start_copy

        def arriving(one: Any) -> Any:
            ready = arrive(one)
            if (
                ready.param_out is not None
                and one.sub_buffer.residence.is_apart
                and one.sub_buffer.residence.steps_on_host
            ):
                self._on_their_way.add(ready.param_out)
            return ready

        def starting(one: Any, grad: Tensor) -> Any:
            found = start_copy(one, grad)
            self._on_their_way.add(found[0])
            return found

        turn.arrive, turn._start_copy = arriving, starting  # type: ignore[method-assign]
        try:
            yield
        finally:
            turn.arrive, turn._start_copy = arrive, start_copy  # type: ignore[method-assign]

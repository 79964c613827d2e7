"""Saving, at once or beside training: one checkpoint under way at most.

Values change in steps only. So a save beside training has its copy of them made while the next forward and backward run, and
the next step waits for what is left of that; files are written from the copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Collectives
from ..errors import CheckpointError
from .save import Prepared
from .shelf import Run, Shelf

_PATIENCE = timedelta(days=1)  # with a rank whose disk is slow; one that is gone is noticed at once
_log = logging.getLogger("dslaunch")


@dataclass(slots=True)
class _UnderWay:
    """A save beside training."""

    prepared: Prepared
    thread: threading.Thread
    is_copied: threading.Event
    stalled_s: float = 0.0  # time that training has waited for it
    problem: BaseException | None = None


class Saver:
    """Of one engine."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self._group: dist.ProcessGroup | None = None
        self._is_group_made = False
        self._under_way: _UnderWay | None = None

    def save(self, prepared: Prepared, *, is_async: bool, begun_at: float) -> None:
        """Write it; `is_async`: return as soon as training may go on. `begun_at` is when training began to wait, by perf_counter.

        Order:  a collective
        Errors: CheckpointError, on every rank; also of a save before, which is waited for
        """
        self.wait()
        self._make_group()
        if not is_async:
            prepared.write(self._group)
            self._tell(prepared, stalled_s=time.perf_counter() - begun_at)
            return
        under_way = _UnderWay(prepared, threading.Thread(), threading.Event())
        under_way.thread = threading.Thread(target=self._run, args=(under_way,), name="dslaunch-checkpoint")
        under_way.stalled_s = time.perf_counter() - begun_at
        self._under_way = under_way
        under_way.thread.start()  # no daemon: an interpreter that ends waits for it

    def before_change(self) -> None:
        """Values are about to change: wait until a save beside training has its copy."""
        under_way = self._under_way
        if under_way is not None and not under_way.is_copied.is_set():
            begun_at = time.perf_counter()
            under_way.is_copied.wait()
            under_way.stalled_s += time.perf_counter() - begun_at

    def check(self) -> None:
        """Report a save beside training that has ended on all ranks.

        Order:  a collective while one is under way
        Errors: CheckpointError
        """
        under_way = self._under_way
        if under_way is None:
            return
        is_done = torch.tensor(float(not under_way.thread.is_alive()), dtype=torch.float64)
        everywhere = self._comm.all_gather_float64(is_done.to(self._device()), what="the end of a save")
        if bool((everywhere > 0).all()):
            self.wait()

    def wait(self) -> None:
        """Wait for a save beside training.

        Errors: CheckpointError, on every rank
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        begun_at = time.perf_counter()
        under_way.thread.join()
        under_way.stalled_s += time.perf_counter() - begun_at
        if under_way.problem is not None:
            raise CheckpointError(str(under_way.problem)) from under_way.problem
        self._tell(under_way.prepared, stalled_s=under_way.stalled_s)

    def _run(self, under_way: _UnderWay) -> None:
        try:
            try:
                shelves = tuple(_copied(shelf) for shelf in under_way.prepared.shelves)
            finally:
                under_way.is_copied.set()
            replace(under_way.prepared, shelves=shelves).write(self._group)
        except BaseException as error:  # told by `wait`, in the thread that trains
            under_way.problem = error

    def _make_group(self) -> None:
        """gloo, whatever moves the model: plans are objects in host memory, and a thread of its own sends them."""
        if not self._is_group_made:
            self._is_group_made = True
            if not self._comm.mesh.world.is_alone:
                self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def _device(self) -> torch.device:
        is_nccl = "nccl" in str(dist.get_backend())
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")

    def _tell(self, prepared: Prepared, *, stalled_s: float) -> None:
        if prepared.rank == 0:
            _log.info("checkpoint %s is there; training waited %.3f s for it", prepared.where, stalled_s)


def _copied(shelf: Shelf) -> Shelf:
    """Return the shelf with its runs in host memory of their own."""
    own: dict[str, Tensor] = {}
    runs: list[Run] = []
    with shelf.here(False):
        flats: Mapping[str, Tensor] = shelf.flats()
        for kind in {run.flat: None for run in shelf.runs}:
            of_kind = [run for run in shelf.runs if run.flat == kind]
            start = min(run.offset for run in of_kind)
            stop = max(run.offset + run.numel for run in of_kind)
            own[kind] = flats[kind][start:stop].detach().to("cpu", copy=True)
            runs += [replace(run, offset=run.offset - start) for run in of_kind]
    return Shelf(
        runs=tuple(runs), dtypes=shelf.dtypes, flats=lambda: own, here=lambda is_written: nullcontext()
    )

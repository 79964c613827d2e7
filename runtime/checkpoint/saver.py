"""Saving, at once or beside training: one checkpoint under way at most.

What the program may change at any time, whole parameters and buffers, is copied at once. Shards, masters and
optimizer states change in steps, and where `ShardedModel.before_change` is called: they are copied while the
next forward and backward run, and code that is about to change them waits for what is left of that. Files are
written from the copies, whose memory stays for the next save.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..comm.captures import ignore_captures
from ..comm.process_group import group_device
from ..comm.rank_group import Job
from ..errors import CheckpointError
from .background import yield_to_training
from .files.snapshot import Memory, Snapshot

if TYPE_CHECKING:  # see runtime/engine/checkpoints.py
    from .save import PreparedSave
    from .snapshots import Snapshots

_log = logging.getLogger("dslaunch")


@dataclass(slots=True)
class _UnderWay:
    """A save beside training."""

    prepared: PreparedSave  # made from copies
    snapshots: tuple[Snapshot, ...]
    thread: threading.Thread = field(default_factory=threading.Thread)
    is_copied: threading.Event = field(default_factory=threading.Event)
    stalled_s: float = 0.0  # time that training has waited for it
    problem: BaseException | None = None


class _Current:
    """The one under way, if any."""

    def __init__(self) -> None:
        self.save: _UnderWay | None = None

    def tell_failure(self) -> None:
        """Log at the end a failure that no call has raised."""
        if self.save is not None and self.save.problem is not None:
            _log.error("%s", self.save.problem)


class Saver:
    """Saver of one engine."""

    def __init__(self, job: Job, snapshots: Snapshots | None = None) -> None:
        self._job = job
        self.snapshots = snapshots  # None: none are taken
        self._memory = Memory()
        self._current = _Current()
        weakref.finalize(self, self._current.tell_failure)  # at exit, too, when the thread has ended

    def save(self, prepared: PreparedSave, *, is_async: bool, begun_at: float) -> None:
        """Write a checkpoint; `is_async`: return as soon as training may go on.

        `begun_at` is when training began to wait, by perf_counter.

        Order:  a collective
        Errors: CheckpointError, on every rank; also of a save before, which is waited for
        """
        self.wait()
        if not is_async:
            prepared.write()
            self._tell(prepared, stalled_s=time.perf_counter() - begun_at)
            return
        snapshots = tuple(Snapshot(tensor_runs, self._memory) for tensor_runs in prepared.all_runs)
        copies = replace(prepared, all_runs=tuple(snapshot.tensor_runs for snapshot in snapshots))
        under_way = _UnderWay(copies, snapshots)
        for snapshot in snapshots:
            snapshot.take_exposed()
            snapshot.note_moment()
        # No daemon: an interpreter that ends waits for it.
        under_way.thread = threading.Thread(target=self._run, args=(under_way,), name="dslaunch-checkpoint")
        self._current.save = under_way
        under_way.thread.start()
        under_way.stalled_s = time.perf_counter() - begun_at

    def before_change(self) -> None:
        """Values are about to change: wait until a save beside training has its copy, and a snapshot all."""
        if self.snapshots is not None:
            self.snapshots.before_change()
        under_way = self._current.save
        if under_way is not None and not under_way.is_copied.is_set():
            begun_at = time.perf_counter()
            under_way.is_copied.wait()
            under_way.stalled_s += time.perf_counter() - begun_at

    def check(self) -> None:
        """Report a save beside training that has ended on all ranks.

        Order:  a collective while one is under way
        Errors: CheckpointError
        """
        under_way = self._current.save
        if under_way is None:
            return
        is_done = not under_way.thread.is_alive()
        everywhere = self._job.all_gather_numbers([is_done], device=group_device(), what="the end of a save")
        if all(one for (one,) in everywhere):
            self.wait()

    def wait(self) -> None:
        """Wait for a save beside training.

        Errors: CheckpointError, on every rank
        """
        under_way = self._current.save
        if under_way is None:
            return
        begun_at = time.perf_counter()
        under_way.thread.join()
        self._current.save = None
        for snapshot in under_way.snapshots:
            snapshot.give_back()
        under_way.stalled_s += time.perf_counter() - begun_at
        if under_way.problem is not None:
            raise CheckpointError(str(under_way.problem)) from under_way.problem
        self._tell(under_way.prepared, stalled_s=under_way.stalled_s)

    def close(self) -> None:
        """Wait for a save beside training and for a snapshot, and give back the memory of copies.

        Errors: as `wait`
        """
        try:
            self.wait()
        finally:
            self._memory.clear()
            if self.snapshots is not None:
                self.snapshots.close()

    def _run(self, under_way: _UnderWay) -> None:
        ignore_captures()
        try:
            for snapshot in under_way.snapshots:
                snapshot.take_rest()
            self._memory.clear()  # frees copies that no longer match the saved tensors
            under_way.is_copied.set()
            yield_to_training()
            under_way.prepared.write()
        except BaseException as error:  # told by `wait`, in the thread that trains
            under_way.problem = error

    def _tell(self, prepared: PreparedSave, *, stalled_s: float) -> None:
        if prepared.rank == 0:
            _log.info("checkpoint %s is there; training waited %.3f s for it", prepared.where, stalled_s)

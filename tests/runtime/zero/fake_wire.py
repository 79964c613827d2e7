"""Ranks as threads of one process, whose collectives block as real ones do, and say so when all stand still.

The n-th collective of a lane is one on all ranks: it ends when each has asked for it. Which thread runs first
makes no difference to what a rank asks for, since nothing tells a rank how far the others are: so one run of
a case stands for all its timings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dslaunch.runtime.comm.collectives import Collectives
from dslaunch.runtime.comm.mesh import ALONE, Axis, Mesh
from dslaunch.runtime.comm.pending import Pending
from dslaunch.runtime.comm.rank_group import Job
from dslaunch.runtime.comm.wire import Wire as RealWire
from dslaunch.runtime.mesh.domain import DENSE, Domain, Domains
from dslaunch.shared.axes import Axes


class Stuck(Exception):
    """Every rank waits for a collective that some rank does not ask for."""


class Wire:
    """What the ranks of one model send."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._condition = threading.Condition()
        self._asked: dict[tuple[int, int], list[Any]] = {}  # by lane and number: each rank's label and value
        self._num_blocked = 0
        self._num_running = 0
        self._is_stuck = False

    def ask(self, lane: int, number: int, rank: int, what: str, value: Any) -> None:
        """Take part in it."""
        with self._condition:
            entries = self._asked.setdefault((lane, number), [None] * self.num_ranks)
            entries[rank] = (what, value)
            self._condition.notify_all()

    def wait(self, lane: int, number: int) -> list[Any]:
        """Every rank's value, in rank order.

        Errors: Stuck, on all ranks; AssertionError if the ranks asked for different ones
        """
        entries = self._asked[lane, number]
        with self._condition:
            self._num_blocked += 1
            while None in entries and not self._is_stuck:
                if self._num_blocked == self._num_running and not self._has_ended_wait():
                    self._is_stuck = True
                    self._condition.notify_all()
                    break
                self._waits_for[threading.get_ident()] = entries
                self._condition.wait()
            self._waits_for.pop(threading.get_ident(), None)
            self._num_blocked -= 1
            if None in entries:
                raise Stuck(f"lane {lane}, number {number}")
        assert len({what for what, _ in entries}) == 1, [what for what, _ in entries]
        return [value for _, value in entries]

    def _has_ended_wait(self) -> bool:
        """Whether a thread that has not woken up yet may go on."""
        return any(None not in entries for entries in self._waits_for.values())

    def run(self, rank_programs: list[Callable[[], Any]]) -> list[Any]:
        """What each rank's program returned, or the exception that ended it."""
        self._asked.clear()
        self._waits_for: dict[int, list[Any]] = {}
        self._num_running, self._num_blocked, self._is_stuck = len(rank_programs), 0, False
        results: list[Any] = [None] * len(rank_programs)

        def run_one(rank: int) -> None:
            try:
                results[rank] = rank_programs[rank]()
            except Exception as error:
                results[rank] = error
            with self._condition:
                self._num_running -= 1
                if 0 < self._num_running == self._num_blocked and not self._has_ended_wait():
                    self._is_stuck = True
                self._condition.notify_all()

        threads = [threading.Thread(target=run_one, args=(rank,)) for rank in range(len(rank_programs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class FakeJob(Job):
    """What the ranks tell each other, and which of them this one is."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.axis, self.wire = Axis(size=wire.num_ranks, index=rank, group=None), RealWire()
        self.leaders = (0,) * wire.num_ranks
        self._fake = wire
        self._numbers = [0, 0]

    def begin(self) -> None:
        """A case begins, on all ranks."""
        self._numbers = [0, 0]

    def send(self, lane: int, what: str, value: Any) -> Callable[[], list[Any]]:
        """Take part in the next collective of the lane; the result waits for its end."""
        self._numbers[lane] += 1
        number = self._numbers[lane]
        self._fake.ask(lane, number, self.index, what, value)
        return lambda: self._fake.wait(lane, number)

    def broadcast(self, tensor: Tensor, *, what: str, source: int = 0) -> None:
        """All ranks are given the same model."""

    def all_gather_objects(self, value: object, *, what: str) -> list[Any]:
        return self.send(0, what, value)()


class FakeCollectives(Collectives):
    """Those of one rank, over a wire."""

    def __init__(self, job: FakeJob) -> None:
        super().__init__(Mesh(replicate=ALONE, shard=job.axis, sharers=job.axis), job.wire)
        self.sharers = self._job = job

    def broadcast(self, tensor: Tensor, *, what: str, source: int = 0) -> None:
        """All ranks are given the same model."""

    def reduce_scatter_or_all_reduce(self, flat: Tensor, *, what: str) -> Pending:
        return Pending(self._average(flat, f"reduce of {what}"))

    def all_gather_from(self, shard: Tensor, flat: Tensor, *, what: str) -> Pending:
        return Pending(self._fill(shard, flat, f"gather of {what}"))

    def _average(self, flat: Tensor, what: str) -> Iterator[Any]:
        arrived = self._job.send(0, what, flat.clone())
        yield _Flight(arrived)
        flat.copy_(torch.stack(arrived()).mean(0))

    def _fill(self, shard: Tensor, flat: Tensor, what: str) -> Iterator[Any]:
        arrived = self._job.send(1, what, shard.clone())
        yield _Flight(arrived)
        flat.copy_(torch.cat(arrived()))


class FakeDomains(Domains):
    """One domain: all ranks share all parameters."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.job: FakeJob = FakeJob(wire, rank)
        self.wire = self.job.wire
        self._of, self._groups = {}, []
        self.axes, self.of_experts, self._stage = Axes(dp=wire.num_ranks), {}, None
        self.dense = Domain(name=DENSE, comm=FakeCollectives(self.job), sharers=[range(wire.num_ranks)])


class _Flight:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait

"""Whether all ranks did the same collectives in the same order: DSLAUNCH_DEBUG=collectives asks after every step.

The ranks agree through the job's store, not by a collective: of ranks that went apart, none need ever meet in one again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from ..errors import CollectiveError
from .collectives import Collectives
from .flight_recorder import NUM_LANES, Collective

_NUM_REMEMBERED = 10_000  # collectives, of which one step should have fewer


class OrderCheck:
    """Of one engine."""

    def __init__(self, comm: Collectives, *, timeout: timedelta) -> None:
        """Order: every rank must construct its checks in the same order"""
        self._comm = comm
        self._timeout = timeout
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._store: Any = dist.distributed_c10d._get_default_store()
        number = self._store.add(f"dslaunch/orders/{self._rank}", 1)
        self._prefix = f"dslaunch/order/{number}"
        self._num_asked = 0
        self._num_compared = (0,) * NUM_LANES
        comm.recorder.remember(_NUM_REMEMBERED)

    def compare(self) -> None:
        """At a step's end, ask whether the step was the same on all ranks.

        Order:  every rank must call this at each step's end
        Errors: CollectiveError, on every rank, that names the first collective that was not; or a rank that did not come
        """
        recorder = self._comm.recorder
        step, before = recorder.step, self._num_compared
        recent = [one for one in recorder.recent() if one.number > before[one.lane]]
        self._num_compared = recorder.issued
        order_hash = str(self._comm.meter.order_hash)
        difference = self._agree(order_hash, lambda hashes: "" if len(set(hashes)) == 1 else "different")
        if difference:
            raise CollectiveError(
                self._agree(json.dumps(recent), lambda texts: _first_difference(texts, step))
            )

    def _agree(self, own: str, decide: Callable[[list[str]], str]) -> str:
        """Return what rank 0 makes of every rank's text."""
        self._num_asked += 1
        place = f"{self._prefix}/{self._num_asked}"
        self._store.set(f"{place}/{self._rank}", own)
        if self._rank == 0:
            texts = [self._read(f"{place}/{rank}", rank) for rank in range(self._world_size)]
            self._store.set(f"{place}/decision", decide(texts))
        decision = self._read(f"{place}/decision", 0)
        if self._rank == 0:  # whoever asks anew has read the decision before
            for name in (*range(self._world_size), "decision"):
                self._store.delete_key(f"{self._prefix}/{self._num_asked - 1}/{name}")
        return decision

    def _read(self, key: str, rank: int) -> str:
        try:
            self._store.wait([key], self._timeout)
        except RuntimeError:
            raise CollectiveError(
                f"rank {rank} has not come to the end of step {self._comm.recorder.step}, at which rank {self._rank} has waited "
                f"{self._timeout.total_seconds():.0f} s for it to compare their collectives; see what it does instead"
            ) from None
        return str(self._store.get(key).decode())


def _first_difference(texts: Sequence[str], step: int) -> str:
    """Name it, as seen by rank 0 and the first rank that has another; `texts` are JSON of the collectives since the last step."""
    orders = [[Collective(*one) for one in json.loads(text)] for text in texts]
    for rank, order in enumerate(orders[1:], start=1):
        for lane in range(NUM_LANES):
            pairs = zip_longest(
                (one for one in order if one.lane == lane), (one for one in orders[0] if one.lane == lane)
            )
            for place, (theirs, ours) in enumerate(pairs, start=1):
                if theirs is None or ours is None or theirs.identity != ours.identity:
                    return (
                        f"rank {rank}'s collective {place} of step {step} was {_named(theirs, ours)}, rank 0's was "
                        f"{_named(ours, theirs)}: every rank must use the same units of the model, in the same order; look for a branch that "
                        "depends on the rank or its data"
                    )
    return f"the ranks' collectives differ, but not in the last {len(orders[0])} of step {step}"


def _named(one: Collective | None, other: Collective | None) -> str:
    if one is None:
        return "none at all"
    is_alike = other is not None and str(one) == str(other)
    return f"{one} ({one.nbytes} bytes)" if is_alike else str(one)

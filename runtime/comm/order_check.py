"""Check that all ranks do the same collectives in the same order.

Ranks that gather units of one size in different orders get each other's values, and nothing stops them. So
fingerprints of the order travel with the gradient norm, before a step changes anything; where ranks compute
forwards together, those without gradients send them beside the next forward. DSLAUNCH_DEBUG=collectives also
asks after every step.

[Note: who is compared with whom]
A fingerprint is of a stream (flight_recorder.py), and compared among the ranks that do the same in it, no
others. What moves parameters, gradients and numbers of the job is the same on all ranks that train the same
parameters. What moves activations along tp, sp or ep depends on the samples of those few ranks: others may
have longer sequences, more samples, or none for some layer.

The ranks agree on what to say through the job's store, not by a collective: of ranks that went apart, none
need ever meet in one again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CollectiveError
from .flight_recorder import DATA_LANE, NUM_LANES, PARAMETER_LANE, Collective, Line, Stream
from .mesh import Lines
from .rank_group import Job, RankGroup
from .rank_names import RankNames
from .wire import before_unwired

_NUM_REMEMBERED = 10_000  # collectives, of which one step should have fewer
_NUM_NAMED = 4
_GRACE = timedelta(seconds=20)
_SHORTEST_WAIT_S = 0.01


class OrderCheck:
    """Order check of one engine."""

    def __init__(
        self,
        job: Job,
        *,
        holders: RankGroup | None = None,
        data_lines: Mapping[str, Lines] | None = None,
        timeout: timedelta,
        grace: timedelta = _GRACE,
    ) -> None:
        """`holders` are the ranks that hold the same model, or parts of it; default all of the job.
        `data_lines` are, by axis, those that send each other activations. A rank that is known to have gone
        another way is waited for no longer than `grace`.

        Order: every rank must construct its checks in the same order
        """
        self._job, self._holders, self._recorder = job, holders or job, job.wire.recorder
        self._grace = grace
        # By fingerprint and rank: the rank whose fingerprint is to be the same.
        self._firsts = [job.leaders]
        self._own_lines: list[Line] = []
        for axis, lines in (data_lines or {}).items():
            first = {rank: line[0] for line in lines for rank in line}
            self._firsts.append(tuple(first[rank] for rank in range(job.size)))
            self._own_lines.append(Line(axis, tuple(next(line for line in lines if job.index in line))))
        store: Any = dist.distributed_c10d._get_default_store()
        is_fake = dist.get_backend() == "fake"  # one process plays a rank of many; its store keeps nothing
        number = 0 if is_fake else store.add(f"dslaunch/orders/{job.index}", 1)

        def talk_of(ranks: Sequence[int]) -> _Talk:
            prefix = f"dslaunch/order/{number}/{len(ranks)}"  # ranks in groups of one size are disjoint
            return _Talk(store, prefix, ranks, job=job, timeout=timeout)

        self._of_job = talk_of(range(job.size))
        self._of_holders = self._of_job if self._holders is job else talk_of(job.peers)
        self._num_compared = (0,) * NUM_LANES
        # Waits for the fingerprints that all ranks had at the end of the last forward without gradients.
        self._sent: Callable[[], list[list[float]]] | None = None
        self._recorder.remember(_NUM_REMEMBERED)

    @property
    def num_fingerprints(self) -> int:
        """Return how many each rank has; the same on all ranks."""
        return len(self._firsts)

    @property
    def fingerprints(self) -> list[float]:
        """Return those of the order so far; see [Note: who is compared with whom].

        Order: a collective, where other ranks still evaluate: what they gather counts on all ranks
        """
        before_unwired()
        meter = self._job.wire.meter
        return [float(meter.order_hash), *(float(meter.data_hash(line)) for line in self._own_lines)]

    def check(self, told: Sequence[Sequence[float]]) -> None:
        """Compare the fingerprints of all ranks, taken at the same place of the program.

        Errors: CollectiveError, on every rank, that names the first collective that was not the same
        """
        before, self._num_compared = self._num_compared, self._recorder.issued
        if self._are_different(dict(enumerate(told))):
            raise CollectiveError(self._describe(before, self._of_job))

    def _are_different(self, told: Mapping[int, Sequence[float]]) -> bool:
        return any(
            one != told[firsts[rank]][place]
            for rank, row in told.items()
            for place, (one, firsts) in enumerate(zip(row, self._firsts, strict=True))
        )

    def end_forward(self, device: torch.device) -> None:
        """A forward without gradients has ended: no step will tell whether it was the same on all ranks.

        Order:  a collective of the holders: where parameters were gathered, they all come here, and ranks
                with another model may evaluate more often, or gather nothing
        Errors: as `check`, for the forward before, on the holders alone
        """
        self.finish()
        what = "the order of collectives"
        self._sent = self._holders.start_all_gather_numbers(self.fingerprints, device=device, what=what)

    def finish(self) -> None:
        """Check the collectives of the last forward without gradients.

        Errors: as `check`, on the holders alone
        """
        wait, self._sent = self._sent, None
        if wait is not None:
            answers = wait()
            before, self._num_compared = self._num_compared, self._recorder.issued
            said = dict(zip(self._of_holders.ranks, answers, strict=True))
            if self._are_different(said):
                raise CollectiveError(self._describe(before, self._of_holders))

    def compare(self) -> None:
        """At a step's end, ask whether the step was the same on all ranks.

        Order:  every rank must call this at each step's end
        Errors: CollectiveError, on every rank, that names the first collective that was not;
                or a rank that did not come
        """
        before, self._num_compared = self._num_compared, self._recorder.issued
        if self._of_job.agree(json.dumps(self.fingerprints), self._whether_different):
            raise CollectiveError(self._describe(before, self._of_job))

    def _whether_different(self, texts: Mapping[int, str]) -> str:
        orders = {rank: json.loads(text) for rank, text in texts.items()}
        return "different" if self._are_different(orders) else ""

    def _describe(self, before: tuple[int, ...], talk: _Talk) -> str:
        recent = [one for one in self._recorder.recent() if one.number > before[one.lane]]

        def compare(texts: Mapping[int, str]) -> str:
            orders = {rank: json.loads(text) if text else None for rank, text in texts.items()}
            return _first_difference(orders, self._recorder.step, self._job.leaders, self._job.names)

        return talk.agree(json.dumps(recent), compare, grace=self._grace)


class _Talk:
    """Messages of some ranks to each other through the job's store."""

    def __init__(
        self,
        store: Any,
        prefix: str,
        ranks: Sequence[int],
        *,
        job: Job,
        timeout: timedelta,
    ) -> None:
        """This rank is among the `ranks`. Another call with the same prefix is of other ranks."""
        self._store, self.ranks, self._rank = store, tuple(ranks), job.index
        self._first = self.ranks[0]
        self._prefix = f"{prefix}/{self._first}"
        self._recorder, self._names, self._timeout = job.wire.recorder, job.names, timeout
        self._num_asked = 0

    def agree(
        self, own: str, decide: Callable[[Mapping[int, str]], str], *, grace: timedelta | None = None
    ) -> str:
        """Return what the first rank makes of every rank's text; one that does not come within
        `grace` has said "".
        """
        self._num_asked += 1
        place = f"{self._prefix}/{self._num_asked}"
        self._store.set(f"{place}/{self._rank}", own)
        if self._rank == self._first:
            deadline = time.monotonic() + (grace or self._timeout).total_seconds()
            texts = {
                rank: self._read(f"{place}/{rank}", rank, deadline, is_needed=grace is None)
                for rank in self.ranks
            }
            self._store.set(f"{place}/decision", decide(texts))
        last = time.monotonic() + self._timeout.total_seconds()
        decision = self._read(f"{place}/decision", self._first, last)
        if self._rank == self._first:  # a rank that asks anew has read the decision before
            for name in (*self.ranks, "decision"):
                self._store.delete_key(f"{self._prefix}/{self._num_asked - 1}/{name}")
        return decision

    def _read(self, key: str, rank: int, deadline: float, *, is_needed: bool = True) -> str:
        try:
            self._store.wait([key], timedelta(seconds=max(_SHORTEST_WAIT_S, deadline - time.monotonic())))
        except RuntimeError:
            if not is_needed:
                return ""
            raise CollectiveError(
                f"{self._names.of(rank)} has not come to the end of step {self._recorder.step}, at which "
                f"{self._names.of(self._rank)} has waited {self._timeout.total_seconds():.0f} s for it to "
                "compare their collectives; see what it does instead"
            ) from None
        return str(self._store.get(key).decode())


_BRANCH = "in the same order; look for a branch that depends on the rank"


def _advice(stream: Stream | None, leaders: Sequence[int]) -> str:
    if stream is not None and stream.lane == DATA_LANE:
        return (
            f"ranks along {stream.axis} compute together and must use the same layers, {_BRANCH}, or on "
            "values that differ along that axis"
        )
    if len(set(leaders)) == 1:
        return f"every rank must use the same units of the model, {_BRANCH} or its data"
    return f"the ranks that train the same layers must use the same units, {_BRANCH} or its data"


def _first_difference(
    told: Mapping[int, list[Any] | None], step: int, leaders: Sequence[int], names: RankNames
) -> str:
    """Name it, as seen by the first rank that did other collectives than the first rank of its stream, and
    by that one.

    Each told its collectives since the last step, by rank; None: it has not come to tell.
    """
    orders = {
        rank: None if one is None else [Collective(*label) for label in one] for rank, one in told.items()
    }
    streams = _streams(orders, leaders)
    for rank, order in orders.items():
        for stream, done in streams.items():
            first = next((one for one in stream.ranks if one in orders), rank)
            if order is None or orders[first] is None or rank == first or rank not in stream.ranks:
                continue
            pairs = zip_longest(done.get(rank, ()), done.get(first, ()))
            for place, (theirs, ours) in enumerate(pairs, start=1):
                if theirs is None or ours is None or theirs.identity != ours.identity:
                    others = [one for one in stream.ranks if one in orders and one not in (rank, first)]
                    did = {one: _at(done.get(one, ()), place) for one in others if orders[one] is not None}
                    return (
                        f"{names.of(rank)}'s collective {place} of step {step} was {_named(theirs, ours)}, "
                        f"{names.of(first)}'s was {_named(ours, theirs)}"
                        f"{_who_did_as(rank, theirs, first, ours, did, names)}: {_advice(stream, leaders)}"
                    )
    silent = next((rank for rank, order in orders.items() if order is None), None)
    talker = next(iter(orders))  # the talker compares
    if silent is not None:
        known = leaders[silent] if orders[leaders[silent]] is not None else talker
        last = ", ".join(map(str, (orders[known] or [])[-_NUM_NAMED:])) or "none at all"
        return (
            f"{names.of(silent)} did other collectives than {names.of(known)} in step {step} and has not "
            f"come to tell which; {names.of(known)}'s last were {last}: {_advice(None, leaders)}"
        )
    num_compared = len(orders[talker] or ())
    return f"the ranks' collectives differ, but not in the last {num_compared} of step {step}"


def _streams(
    orders: Mapping[int, list[Collective] | None], leaders: Sequence[int]
) -> dict[Stream, dict[int, list[Collective]]]:
    """Return each rank's collectives, by stream: those of parameters first, since the order of gradients
    follows from theirs, and those of data last.
    """
    peers: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        peers.setdefault(leader, []).append(rank)
    streams: dict[Stream, dict[int, list[Collective]]] = {}
    for rank, order in orders.items():
        for collective in order or ():
            of_ranks = streams.setdefault(collective.stream(peers[leaders[rank]]), {})
            of_ranks.setdefault(rank, []).append(collective)
    return dict(sorted(streams.items(), key=lambda item: (item[0].lane != PARAMETER_LANE, item[0])))


def _at(done: Sequence[Collective], place: int) -> Collective | None:
    """Return the collective number `place`, None if there were fewer."""
    return done[place - 1] if place <= len(done) else None


def _who_did_as(
    rank: int,
    theirs: Collective | None,
    leader: int,
    ours: Collective | None,
    did: Mapping[int, Collective | None],
    names: RankNames,
) -> str:
    """Say which of the others with the same layers, where ranks have places, did as each of the two."""
    clauses = []
    for model, its in ((leader, ours), (rank, theirs)):
        alike = [one for one, other in did.items() if _identity(other) == _identity(its)]
        if alike and names.has_places:
            clauses.append(f"{names.of(*alike)} did as rank {model}")
    return "".join(f"; {one}" for one in clauses)


def _identity(one: Collective | None) -> tuple[str, str, int] | None:
    return None if one is None else one.identity


def _named(one: Collective | None, other: Collective | None) -> str:
    if one is None:
        return "none at all"
    is_alike = other is not None and str(one) == str(other)
    return f"{one} ({one.nbytes} bytes)" if is_alike else str(one)

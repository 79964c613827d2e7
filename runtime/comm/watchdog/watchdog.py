"""A thread on each rank that notices a collective that does not come to its end,
and has all ranks say where they stand.

A round
-------
A rank that has waited too long rings: it leaves a note on the board. The others look for it every few
seconds, and then every rank leaves its position. The lowest rank that did so reads all of them and prints one
report. The ranks do not touch the board otherwise, and each number of a round is used once. The program is
not disturbed: it goes on waiting until torch ends it.

Other paths
-----------
Ranks that did not do the same collectives never meet again. So a rank that waits for more than some seconds
leaves its position, and compares it with that of the first rank that it should do the same as. If they
differ, that is written on the board, and each rank that waits ends with it as its error.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ...errors import CollectiveError, ConfigError
from ..captures import ignore_captures
from ..flight_recorder import NUM_LANES, Flight, FlightRecorder
from ..rank_group import Job
from ..rank_names import RankNames
from .board import Board, BoardLost
from .hang_report import describe_hang, different_paths
from .position import Position, take_position

_DEFAULT_PART = 6  # part of the timeout: 5 minutes of 30
_LONGEST_POLL_S = 5.0
_LOOK_S = 1.0  # between two looks at this rank alone
_SHORTEST_GRACE_S = 2.0
_END_S = 2.0  # time for the thread to end, when the program does
_APART = "apart"  # the note of ranks whose collectives differ
_log = logging.getLogger("dslaunch")


class Watchdog:
    """Watchdog of one engine. It costs one look at the board every few seconds."""

    def __init__(
        self,
        recorder: FlightRecorder,
        board: Board,
        *,
        limit_s: float,
        timeout: timedelta,
        leaders: Sequence[int] | None = None,
        names: RankNames | None = None,
    ) -> None:
        """`limit_s` is how long a collective may take; torch ends it after `timeout`. `leaders` and `names`:
        see Job.
        """
        self._recorder = recorder
        self._board = board
        self._limit_s, self._timeout = limit_s, timeout
        self._poll_s = min(_LONGEST_POLL_S, limit_s / 4)
        self._look_s = min(_LOOK_S, self._poll_s)
        self._told_s = 0.0  # how long this rank waits, as it was told the last time
        self._grace_s = max(_SHORTEST_GRACE_S, 3 * self._poll_s)  # time for others to notice, and to answer
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._leaders = tuple(leaders or (0,) * self._world_size)
        self._names = names or RankNames()
        self._group = weakref.ref(dist.distributed_c10d._get_default_group())
        self._round = 0
        self._reported = [0] * NUM_LANES  # numbers of the last collectives that a report has seen
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dslaunch-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch, until stop(), or the end of the process group or of the program."""
        self._thread.start()
        atexit.register(_stop, weakref.ref(self))

    def stop(self) -> None:
        """Watch no longer. A thread that is inside torch when the interpreter ends would end the
        process with SIGABRT.
        """
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)

    def _run(self) -> None:
        ignore_captures()
        look_at = time.monotonic() + self._poll_s
        while not self._stopped.wait(self._look_s) and self._is_of_this_group():
            self._tell_wait()
            if time.monotonic() < look_at:
                continue
            look_at = time.monotonic() + self._poll_s
            overdue = self._overdue()
            try:
                self._compare_paths()
                self._look(overdue)
            except BoardLost as lost:
                if overdue is not None and dist.is_initialized():
                    self._speak_alone(overdue, lost)
        self._board.close()

    def _tell_wait(self) -> None:
        """Tell the launcher how long this rank has stood in one collective, if that is long."""
        tell = self._recorder.tell_wait
        if tell is None:
            return
        now = time.monotonic()
        longest_s = max((now - one.began for one in self._recorder.under_way()), default=0.0)
        waits_s = longest_s if longest_s > _LOOK_S else 0.0
        if waits_s or self._told_s:
            tell(round(waits_s, 1))
        self._told_s = waits_s

    def _is_of_this_group(self) -> bool:
        """Whether the group that the board is of is there still, and is not replaced by another one."""
        group = self._group()
        return group is not None and group is dist.group.WORLD

    def _look(self, overdue: Flight | None) -> None:
        ring = f"{self._round}/ring"
        if not self._board.has(
            ring
        ):  # asked first: a note that a stopped store takes late would ring for nothing
            if overdue is None:
                return
            self._board.set(ring, "")
        position = take_position(self._recorder, rank=self._rank)
        self._board.set(self._note(self._rank), position.to_json())
        self._reported = list(position.issued)
        if self._is_reporter():
            self._tell()
        self._round += 1

    def _compare_paths(self) -> None:
        """Compare this rank's path with that of its first rank, see "Other paths" above."""
        now = time.monotonic()
        waits = [one.label for one in self._recorder.under_way() if now - one.began > self._poll_s]
        if not waits:
            return
        if self._board.has(_APART):
            self._end_program(self._board.get(_APART).decode())
        own = take_position(self._recorder, rank=self._rank)
        self._board.set(f"path/{self._rank}", own.to_json())
        firsts = {self._leaders[self._rank], *(label.ranks[0] for label in waits if label.ranks)}
        for first in firsts - {self._rank}:
            if self._board.has(f"path/{first}"):
                other = Position.from_json(self._board.get(f"path/{first}"))
                text = different_paths({first: other, self._rank: own}, self._leaders, self._names)
                if text:
                    where = (
                        f"{self._names.of(one.rank)} is at {one.stack[-1]}"
                        for one in (other, own)
                        if one.stack
                    )
                    text = "; ".join((text, *where))
                    self._board.set(_APART, text)
                    self._end_program(text)

    def _end_program(self, text: str) -> None:
        """The program's own thread stands still in torch, where no exception reaches it."""
        self._say(f"dslaunch: {text}; every rank must use the same units of the model, in the same order\n")
        sys.stdout.flush()
        # Wait until all have said it: an ending rank takes connections of others away, and rank 0 the board.
        try:
            self._board.set(f"{_APART}/{self._rank}", "")
            self._wait_for(*(f"{_APART}/{rank}" for rank in range(self._world_size)))
            if self._rank == 0:
                self._stopped.wait(self._poll_s)
        except BoardLost:
            _log.debug("the board is gone")
        os._exit(CollectiveError.exit_code)

    def _overdue(self) -> Flight | None:
        """A collective that has taken too long, unless a report has seen it."""
        now = time.monotonic()
        for flight in self._recorder.under_way():
            if now - flight.began > self._limit_s and flight.label.number > self._reported[flight.label.lane]:
                return flight
        return None

    def _is_reporter(self) -> bool:
        """Whether no lower rank has answered, or will."""
        if self._rank > 0:
            self._wait_for(self._note(0))
            if any(self._board.has(self._note(rank)) for rank in range(self._rank)):
                return False
        return self._board.is_first(f"{self._round}/reporter")

    def _tell(self) -> None:
        notes = [self._note(rank) for rank in range(self._world_size)]
        self._wait_for(*notes)
        positions = {
            rank: Position.from_json(self._board.get(note))
            for rank, note in enumerate(notes)
            if self._board.has(note)
        }
        text = describe_hang(positions, world_size=self._world_size, leaders=self._leaders, names=self._names)
        if text is not None:
            self._say(
                f"{text}dslaunch: the ranks go on waiting; torch gives up after "
                f"{self._timeout.total_seconds():.0f} s\n"
            )

    def _wait_for(self, *notes: str) -> None:
        """Wait until these notes are there, or are expected no more."""
        deadline = time.monotonic() + self._grace_s
        while not self._board.has(*notes) and time.monotonic() < deadline:
            if self._stopped.wait(self._poll_s / 4):
                return

    def _speak_alone(self, overdue: Flight, lost: BoardLost) -> None:
        """Report what this rank knows: without the board it cannot tell the others' positions."""
        self._reported = list(self._recorder.issued)
        waited_s = time.monotonic() - overdue.began
        self._say(
            f"dslaunch: it hangs: {self._names.of(self._rank)} has waited {waited_s:.0f} s for "
            f"{overdue.label} (step {overdue.label.step}), and cannot ask the others: {lost}; rank 0, which "
            "serves it, is stopped, has ended or cannot be reached\n"
        )

    def _say(self, text: str) -> None:
        """Write in one piece: all ranks may share this stderr."""
        sys.stderr.write(text)
        sys.stderr.flush()
        if self._recorder.tell_hang is not None:
            self._recorder.tell_hang(text)

    def _note(self, rank: int) -> str:
        return f"{self._round}/rank/{rank}"


def watch(job: Job, *, limit_s: float | None, timeout: timedelta) -> Watchdog | None:
    """Watch these collectives until they are gone; None where no other rank is waited for, or `limit_s` is 0.

    Order:  as Board
    Errors: ConfigError for a limit that torch's own `timeout` would forestall
    """
    if limit_s == 0 or job.is_alone:
        return None
    timeout_s = timeout.total_seconds()
    if limit_s is None:
        limit_s = timeout_s / _DEFAULT_PART
    elif limit_s >= timeout_s:
        raise ConfigError(
            f"DSLAUNCH_WATCHDOG_S={limit_s:g}: torch gives a collective up after {timeout_s:g} s; give less, "
            "or 0 for no report, or raise DEEPSPEED_TIMEOUT, which is in minutes"
        )
    try:
        board = Board(dist.distributed_c10d._get_default_store(), rank=dist.get_rank())
    except BoardLost as lost:
        _log.warning("a hang will not be explained: %s", lost)
        return None
    watchdog = Watchdog(
        job.wire.recorder, board, limit_s=limit_s, timeout=timeout, leaders=job.leaders, names=job.names
    )
    watchdog.start()
    weakref.finalize(job, watchdog._stopped.set).atexit = False  # the thread alone keeps the watchdog
    return watchdog


def _stop(watchdog: weakref.ref[Watchdog]) -> None:
    alive = watchdog()
    if alive is not None:
        alive.stop()

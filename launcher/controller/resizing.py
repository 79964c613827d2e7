"""A change of hosts while the job runs: the workers are asked to save and end, and the job goes on until they
do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from ..errors import EXIT_CHANGE
from ..job.partners import partners_of
from ..job.plan import Plan
from ..output.console import Console
from ..wire.frames import Leaving, Note, Resize, Stop
from .roster import HostState, Roster

PATIENCE_S = 600.0  # after this time a line says that the program has not saved since it was asked to


class HostWatch(Protocol):
    """Knows which other hosts could take part in the job. No method blocks."""

    def why_change(self, leaving: Mapping[str, str]) -> str:
        """Return why the job should change its hosts; empty if it should not. `leaving`: hosts that are
        told to go, each with the reason.
        """
        ...


class Resizing:
    """The request to the workers to end for a change of hosts, and its result."""

    def __init__(self, roster: Roster, console: Console, watch: HostWatch | None, plan: Plan) -> None:
        """If `watch` is None, the job's hosts never change."""
        self._has_snapshots = bool(plan.snapshot_every)
        self._roster = roster
        self._console = console
        self._watch = watch
        self._kill_grace_s = plan.kill_grace_s
        self._by_disk = False
        self._why = ""  # the reason that the workers were told; empty before they were asked
        self._reminded_at = 0.0
        self._first_end_at: float | None = None
        self._is_stopped = False
        self.leaving: dict[str, str] = {}  # hosts that were told to go, each with the reason

    def hear(self, host: HostState, item: Leaving | Note) -> None:
        """Take a host's own message."""
        if isinstance(item, Note):
            self._console.warn(f"{host.name}: {item.text}")
        elif host.name not in self.leaving:
            self.leaving[host.name] = item.why

    def look(self, *, is_running: bool) -> None:
        """Ask the workers to save and end, if there is a reason to; report if they take long."""
        if self._watch is None or not is_running:
            return
        now = time.monotonic()
        if self._first_end_at is not None:
            self._look_at_end(now)
            return
        why = self._watch.why_change(self.leaving)
        by_disk = self._has_snapshots and self._lose_both_copies()
        if why and (why, by_disk) != (self._why, self._by_disk):
            by = "checkpoint, or a snapshot" if self._has_snapshots and not by_disk else "checkpoint"
            self._console.say(f"{why}: the hosts change when the program has saved its next {by}")
            self._roster.send(Resize(why, by_disk))
            self._reminded_at = self._reminded_at or now
            self._why, self._by_disk = why, by_disk
        if self._why and now - self._reminded_at > PATIENCE_S:
            self._reminded_at = now
            self._console.warn(
                f"the program has saved no checkpoint for {PATIENCE_S / 60:g} minutes since it was asked "
                f"({self._why}), so the hosts stay as they are; the job goes on"
            )

    def _lose_both_copies(self) -> bool:
        """Tell whether a host is told to go together with the one that has copies of its snapshots."""
        hosts = [one for one in self._roster if not one.plan.role]
        partners = partners_of([one.plan.host.rack for one in hosts])
        return any(
            one.name in self.leaving and (place is None or hosts[place].name in self.leaving)
            for one, place in zip(hosts, partners, strict=True)
        )

    def _look_at_end(self, now: float) -> None:
        """End ranks that do not end with the others, which would wait for them."""
        is_late = now - (self._first_end_at or now) > self._kill_grace_s
        if is_late and self._roster.num_running and not self._is_stopped:
            self._is_stopped = True
            self._console.warn(
                f"{self._roster.num_running} workers did not end within --kill_grace={self._kill_grace_s:g} "
                f"s of the first that ended with code {EXIT_CHANGE}, and are stopped; all ranks must end then"
            )
            for host in self._roster:
                host.send(Stop(self._kill_grace_s))

    def takes_end(self, code: int) -> bool:
        """Tell whether a worker with this exit code ended because it was asked to."""
        if self._is_stopped:
            return True
        if code != EXIT_CHANGE or not self._why:
            return False
        self._first_end_at = self._first_end_at or time.monotonic()
        return True

    @property
    def change(self) -> str:
        """Return why the job ended for a change of hosts; empty if it did not."""
        return "" if self._first_end_at is None else self._why

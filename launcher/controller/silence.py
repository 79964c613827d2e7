"""Decides who is at fault for a silence: a host, or this machine, which stood still or has no network."""

from __future__ import annotations

import time
from typing import Protocol

from ..job.verdict import Failure, LauncherFailure
from .link import LinkEnd
from .roster import HostState, Roster


class FailHost(Protocol):
    """Notes that a host has failed, and leaves it."""

    def __call__(self, host: HostState, message: str, at_s: float, *, is_way_lost: bool = False) -> None: ...


class Silence:
    """The silences of the hosts of one job; it adds to the failures of the job."""

    def __init__(
        self, roster: Roster, failures: list[Failure], fail_host: FailHost, *, heartbeat_s: float
    ) -> None:
        self._roster, self._failures, self._fail_host = roster, failures, fail_host
        self._heartbeat_s = heartbeat_s
        self._stood_still_s = 0.0
        self._excused_until = 0.0  # the end of a stream before this time is not its host's fault

    def look(self) -> list[HostState]:
        """Give up hosts that are silent for too long; return them."""
        lost: list[HostState] = []
        if self._roster.are_all_silent(self._heartbeat_s / 2):  # in this time two replies should have come
            silent_s = min(host.link.silent_s() for host in self._roster if not host.is_over)
            if self._roster.are_all_silent(self._heartbeat_s):
                what = f"nothing is heard of any host for {silent_s:.0f} s: this machine has no network"
                self._fail_launcher(what, time.monotonic() - silent_s)
                lost = [host for host in self._roster if not host.is_over and not host.plan.is_local]
                for host in lost:
                    self._roster.leave(host)
            return lost
        for host in self._roster:
            silence = self._roster.why_silent(host)
            if silence is not None:
                if self._is_launcher_at_fault and host.hello is not None:
                    self._roster.leave(host)
                else:
                    self._fail_host(host, *silence)
                lost.append(host)
        return lost

    def look_for_standstill(self) -> None:
        """If this process stood still, blame no host for silence: the hosts may have ended the job
        meanwhile.
        """
        gap_s = self._roster.forgive_standstill()
        if gap_s < self._heartbeat_s / 2 or not any(host.hello for host in self._roster):
            return
        self._stood_still_s = gap_s
        self._excused_until = time.monotonic() + self._heartbeat_s
        if gap_s > self._heartbeat_s:
            self._fail_launcher(f"this machine stood still for {gap_s:.0f} s", time.monotonic() - gap_s)

    def lose_host(self, host: HostState, end: LinkEnd, at_s: float) -> None:
        """Handle the end of a host's stream. After a standstill of this process that is not the host's
        fault: it heard nothing from us, so it had to end.
        """
        self.look_for_standstill()  # a standstill may just be over, and this may be the first event since
        if time.monotonic() < self._excused_until and host.hello is not None:
            self._fail_launcher(f"this machine stood still for {self._stood_still_s:.0f} s", at_s)
        if self._is_launcher_at_fault and host.hello is not None:
            self._roster.leave(host)
        else:
            self._fail_host(host, end.message, at_s, is_way_lost=end.is_way_lost)

    @property
    def _is_launcher_at_fault(self) -> bool:
        """Tell whether this machine was the silent side: the hosts then end sooner or later."""
        return any(isinstance(one, LauncherFailure) for one in self._failures)

    def _fail_launcher(self, what: str, at_s: float) -> None:
        """Blame this machine, and no host; report it once."""
        if not self._is_launcher_at_fault:
            message = (
                f"{what}, and hosts end a job of which they hear nothing for "
                f"--heartbeat={self._heartbeat_s:g} s; no host is at fault: keep this machine awake and "
                "connected, or give a longer --heartbeat"
            )
            self._failures.append(LauncherFailure(message=message, at_s=at_s))

"""The servers of a job: they start before the trainers, are waited for until they are healthy, may be started
again when they end, and end with the trainers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..inputs.host_list import folded
from ..job.master_address import LOOPBACK, master_address
from ..job.plan import Plan
from ..job.server_plan import hosts_variables
from ..job.verdict import HostFailure, RankFailure, ServerEnd
from ..options.roles import Role
from ..output.console import Console
from ..wire.frames import Healthy, Start, StartAgain, Started, Stop
from ..wording import cleaned, count
from .roster import HostState, Roster

EXIT_UNHEALTHY = 1
EARLY_S = 60.0  # a server that ends within this time of its start may end so again
LONGEST_PAUSE_S = 60.0


@dataclass(slots=True, eq=False)
class _Server:
    """One server. Times are on the monotonic clock."""

    role: Role
    host: HostState
    began_at: float = float("inf")  # when it was asked to start, the last time
    is_ready: bool = False  # it is healthy, or has ended as it may
    problem: str = "does not run yet"
    num_restarts: int = 0
    num_early: int = 0  # ends soon after a start, one after the other

    @property
    def name(self) -> str:
        return f"{self.role.name} on {self.host.name}"


class Servers:
    """The servers of one attempt; without roles there are none, and each question is answered at once."""

    def __init__(self, roster: Roster, console: Console, plan: Plan) -> None:
        self._roster, self._console, self._plan = roster, console, plan
        self._all = {host: _Server(plan.role_of(host.plan), host) for host in roster if host.plan.role}
        self._trainers = [host for host in roster if not host.plan.role]
        self._has_ended = False  # the trainers have ended, and the servers were asked to end
        self._address_of: dict[int, str] = {}  # node_rank -> address, where one had to be found
        self.master_addr = ""

    @property
    def is_there(self) -> bool:
        return bool(self._all)

    @property
    def hosts(self) -> tuple[HostState, ...]:
        """Hosts of the servers."""
        return tuple(self._all)

    @property
    def num_up(self) -> int:
        """Number of servers that started."""
        return sum(len(host.pids) for host in self._all)

    @property
    def ends(self) -> tuple[ServerEnd, ...]:
        """Return what is reported of each server."""
        return tuple(ServerEnd(one.role.name, one.host.name, one.num_restarts) for one in self._all.values())

    # The start.

    def names_of(self, host: HostState) -> tuple[str, tuple[str, ...]]:
        """Return the address at which others should reach a host, and its names, to be tried after it."""
        hello = host.hello
        local = next((one.link.local_address for one in self._roster if one.link.local_address), "")
        address = master_address(
            is_one_machine=all(one.plan.is_local for one in self._roster),
            reached_at="" if hello is None else hello.reached_at,
            hostname=host.name if hello is None else hello.hostname,
            address_to_peers=local,
        )
        return address, (host.name,) if hello is None else (hello.hostname, host.name)

    def found(self, host: HostState, address: str) -> None:
        """Take the address at which the trainers reach a host."""
        self._address_of[host.plan.node_rank] = address

    def variables(self) -> dict[str, str]:
        """Return the variables with the addresses of all roles."""
        found = {
            host.plan.node_rank: self._address_of.get(host.plan.node_rank) or self.names_of(host)[0]
            for host in self._roster
            if self._all
        }
        if found and self.master_addr not in ("", LOOPBACK):
            found[0] = self.master_addr
        return hosts_variables(self._plan, found)

    def start(self) -> None:
        """Ask all servers to start."""
        variables = self.variables()
        for one in self._all.values():
            one.began_at = time.monotonic()
            one.host.start(Start("", 0, variables))

    def is_ready(self, host: HostState) -> bool:
        """Tell whether the trainers need not wait for this host."""
        return host not in self._all or self._all[host].is_ready

    def progress(self) -> str:
        """Describe the wait for servers."""
        waiting = [one for one in self._all.values() if not one.is_ready]
        what = f"{len(waiting)} of {count(len(self._all), 'server')}"
        first = f": {waiting[0].name} {waiting[0].problem}" if waiting else ""
        return f"waiting for {what}{first}; for {self._plan.health_timeout_s:g} s at most"

    def has_started(self, host: HostState, item: Started) -> None:
        """Note that a server's process runs."""
        one = self._all.get(host)
        if one is None:
            return
        one.problem = "does not answer yet"
        if one.role.health is None:
            self._be_ready(one)

    def hear(self, host: HostState, item: Healthy) -> None:
        """Take the answer of a server that was asked for its health."""
        one = self._all.get(host)
        if one is None:
            return
        if item.problem:
            one.problem = cleaned(item.problem, 200)
            return
        if item.note and len(self._roster) > 1 and not all(other.plan.is_local for other in self._roster):
            self._console.warn(f"{one.name}: {cleaned(item.note, 300)}")
        took_s = time.monotonic() - one.began_at
        again = " again" if one.num_restarts else ""
        self._console.say(f"{one.name} is healthy{again} after {took_s:.1f} s")
        self._be_ready(one)

    def _be_ready(self, one: _Server) -> None:
        one.is_ready = True
        self._record("healthy", one)

    def _record(self, event: str, one: _Server) -> None:
        self._console.telemetry.record_of_attempt(
            event,
            rank=min(one.host.ranks),
            role=one.role.name,
            host=one.host.name,
            restarts=one.num_restarts,
        )

    def look(self) -> HostFailure | None:
        """Return the failure of a server that is not healthy in time, if there is one."""
        limit_s = self._plan.health_timeout_s
        for one in self._all.values():
            if one.role.health is None or one.is_ready or self._has_ended:
                continue
            if time.monotonic() - one.began_at > limit_s:
                message = (
                    f"{one.role.name} is not healthy {limit_s:g} s after its start (--role_timeout): "
                    f"it {one.problem}, asked at {one.role.health.text}"
                )
                one.began_at = float("inf")
                return HostFailure(
                    host=one.host.name, message=message, at_s=time.monotonic(), exit_code=EXIT_UNHEALTHY
                )
        return None

    # The end.

    def failure_by(self, host: HostState, ended: RankFailure, *, is_running: bool) -> RankFailure | None:
        """Return the failure that the end of a server is; None if the job ends with it, if it may end, or if
        it is started again. `is_running`: the job is neither failing nor stopping.
        """
        one = self._all[host]
        if self._has_ended:
            return None
        if one.role.may_end and ended.code == 0:
            self._console.say(f"{one.name} ended with code 0, as it may")
            one.is_ready = True
            return None
        if not is_running:
            return ended
        if one.num_restarts >= one.role.max_restarts:
            used = (
                f"it was started again {count(one.num_restarts, 'time')}, as often as --role_restarts allows"
            )
            return ended._replace(evidence=(*ended.evidence, used)) if one.num_restarts else ended
        one.num_restarts += 1
        one.is_ready, one.problem = False, "is started again"
        now = time.monotonic()
        one.num_early = one.num_early + 1 if now - one.began_at < EARLY_S else 0
        pause_s = min(LONGEST_PAUSE_S, 2.0 ** (one.num_early - 2)) if one.num_early > 1 else 0.0
        one.began_at = now + pause_s
        when = f" in {pause_s:g} s" if pause_s else ""
        self._console.say(
            f"{ended.describe()}: starting it again{when} "
            f"({one.num_restarts} of {count(one.role.max_restarts, 'restart')})"
        )
        self._record("server_restart", one)
        host.pids.clear()
        host.exit_codes.clear()
        host.send(StartAgain(pause_s))
        return None

    def end_with_trainers(self) -> None:
        """Ask the servers to end, once all trainers have ended and none of them failed."""
        if not self._all or self._has_ended:
            return
        if not all(host.is_started and len(host.exit_codes) == len(host.ranks) for host in self._trainers):
            return
        self._has_ended = True
        grace_s = self._plan.kill_grace_s
        running = [one for one in self._all.values() if one.host.num_running]
        if running:
            names = folded(dict.fromkeys(one.host.name for one in running))
            what = "its server" if len(running) == 1 else f"{len(running)} servers"
            how = f"SIGTERM, and SIGKILL after {grace_s:g} s" if grace_s else "SIGKILL"
            self._console.say(f"the trainers have ended: stopping {what} on {names} ({how})")
        for host in self._all:
            host.send(Stop(grace_s))

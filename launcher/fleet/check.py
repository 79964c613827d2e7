"""A look at all hosts at the same time, before a job is tried: differences, missing parts, connections."""

from __future__ import annotations

import math
import pkgutil
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backends.channel import Channel
from ..controller.link import LinkEnd
from ..controller.master_search import REACH_TIMEOUT_S, candidates_of
from ..controller.roster import AgentEvent, HostState, Roster
from ..inputs.hostfile import Host
from ..job.master_address import master_address
from ..job.plan import NodePlan
from ..output.console import Console
from ..wire.frames import Facts, Hello, Inspect, Listen, Listening, Reach, Reached
from .check_facts import ClusterFacts, HostFacts, read_answer

NUM_CLOCK_SAMPLES = 5
POLL_S = 0.2
SILENCE_S = 10.0  # a connected host that is silent for so long counts as lost
HELLO_PART = 1 / 6  # part of a host's time in which its agent must say its first word
PROGRAM_MARGIN_S = 0.9  # part of a host's time after which a program that we start there is ended


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """The settings of a look. `python` and `cwd` are those of a host without its own."""

    python: str
    cwd: str
    port: int
    is_port_fixed: bool
    asks_torch: bool
    timeout_s: float  # time for one host, from the beginning of its connection
    timeout_option: str = "--timeout"  # the option with which the user can make it longer


@dataclass(slots=True, eq=False)
class _Look:
    """The state of the look at one host."""

    host: HostState
    num_slots: int | None
    problem: str = ""
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    waiting_for: set[str] = field(default_factory=set)
    clock_asked_at: float = 0.0
    num_clock_samples: int = 0
    clock_offset_s: float | None = None
    clock_error_s: float = float("inf")
    is_reach_asked: bool = False
    reach: tuple[str, ...] | None = None
    is_asked: bool = False
    is_done: bool = False


class Check:
    """One look. `num_slots` has one number for each node, None if it is left to the host."""

    def __init__(
        self,
        nodes: Sequence[NodePlan],
        num_slots: Sequence[int | None],
        settings: CheckSettings,
        *,
        connect: Callable[[NodePlan], Channel],
        console: Console,
    ) -> None:
        self._settings = settings
        self._console = console
        self._roster = Roster(
            nodes,
            connect=connect,
            silence_s=SILENCE_S,
            hello_timeout_s=max(SILENCE_S, settings.timeout_s * HELLO_PART),
            enter_timeout_s=settings.timeout_s,
            connect_timeout_s=settings.timeout_s,
        )
        self._looks = {
            host: _Look(host=host, num_slots=slots)
            for host, slots in zip(self._roster, num_slots, strict=True)
        }
        self._first = self._looks[self._roster.hosts[0]]
        self._token = secrets.token_hex(16)
        self._listening: Listening | None = None
        self._candidates: tuple[str, ...] = ()
        self._wall_minus_monotonic_s, self._wall_error_s = wall_minus_monotonic()

    def run(self) -> ClusterFacts:
        """Run until every host has answered, failed or used up its time; then no process is left on the
        hosts.
        """
        began = time.monotonic()
        with self._roster:
            while missing := [look for look in self._looks.values() if not look.is_done]:
                names = [look.host.name for look in missing]
                self._console.progress("looked at", len(self._looks), names, began)
                event = self._roster.next(POLL_S)
                if event is not None:
                    self._handle(event)
                self._finish()
        self._console.end_progress()
        return ClusterFacts(
            hosts=tuple(self._facts_of(look) for look in self._looks.values()),
            port=self._settings.port,
            is_port_fixed=self._settings.is_port_fixed,
            candidates=self._candidates,
            listening_problem=self._listening.problem if self._listening else "",
            timeout_s=self._settings.timeout_s,
            timeout_option=self._settings.timeout_option,
            took_s=time.monotonic() - began,
        )

    def _handle(self, event: AgentEvent) -> None:
        look, item = self._looks[event.host], event.item
        if look.is_done:
            return
        if isinstance(item, LinkEnd):
            look.problem = item.message
            look.is_done = True
        elif isinstance(item, Hello) and not look.is_asked:
            look.is_asked = True
            self._ask(look)
        elif isinstance(item, Listening) and look is self._first:
            self._listening = item
            look.waiting_for.discard("port")
            if item.problem:
                self._inspect(look, "port_owner", port=self._settings.port)
        elif isinstance(item, Facts):
            self._take(look, item, event.at_s)
        elif isinstance(item, Reached) and look.is_reach_asked:
            unanswered = ["was not tried"] * len(self._candidates)
            look.reach = tuple([*item.problems, *unanswered][: len(self._candidates)])
            look.waiting_for.discard("reach")

    def _ask(self, look: _Look) -> None:
        """Ask all questions at once, so that a question without an answer does not delay the others."""
        settings, host = self._settings, look.host.plan.host
        if look is self._first and len(self._looks) > 1:
            look.waiting_for.add("port")
            look.host.send(Listen(settings.port, self._token))
        self._ask_clock(look)
        self._inspect(look, "system")
        for question, path in (("shm", "/dev/shm"), ("tmp", "/tmp"), ("cwd", host.cwd or settings.cwd)):
            self._inspect(look, question, path=path)
        self._inspect(look, "link", path="/sys/class")
        timeout_s = settings.timeout_s * PROGRAM_MARGIN_S
        self._inspect(look, "gpu", timeout_s=timeout_s)
        python = self._python_of(host)
        for question in ("python", "torch") if settings.asks_torch else ("python",):
            self._inspect(look, question, python=python, timeout_s=timeout_s)
        self._inspect(look, "nvml", python=python, timeout_s=timeout_s, program=_nvml_program())

    def _python_of(self, host: Host) -> str:
        """Return the Python of the host's ranks; empty if it is that of the agent."""
        return host.python or ("" if host.exec_prefix else self._settings.python)

    def _inspect(self, look: _Look, question: str, **given: object) -> None:
        look.waiting_for.add(question)
        look.host.send(Inspect(question, given))

    def _ask_clock(self, look: _Look) -> None:
        look.waiting_for.add("clock")
        look.clock_asked_at = time.monotonic()
        look.host.send(Inspect("clock", {}))

    def _take(self, look: _Look, item: Facts, at_s: float) -> None:
        if item.question not in look.waiting_for:
            return
        look.waiting_for.discard(item.question)
        answer, why_not = read_answer(item.question, item.facts)
        if answer is None:
            look.wrong.append((item.question, why_not))
        elif item.question == "clock":
            self._take_clock(look, answer["time"], at_s)
        else:
            look.answers[item.question] = answer

    def _take_clock(self, look: _Look, host_time: float, at_s: float) -> None:
        """Keep the clocks' difference from the shortest of several round trips: the host's clock was read at
        some moment between the trip's start and end.
        """
        error_s = max(0.0, at_s - look.clock_asked_at) / 2 + self._wall_error_s
        if error_s < look.clock_error_s:
            middle = self._wall_minus_monotonic_s + (at_s + look.clock_asked_at) / 2
            look.clock_offset_s, look.clock_error_s = host_time - middle, error_s
        look.num_clock_samples += 1
        if look.num_clock_samples < NUM_CLOCK_SAMPLES:
            self._ask_clock(look)

    def _finish(self) -> None:
        """Ask nodes that have not yet tried to reach node 0, and note the nodes that are done."""
        now = time.monotonic()
        can_reach = self._listening is not None and not self._listening.problem and not self._first.problem
        for look in self._looks.values():
            if look.is_done:
                continue
            is_peer = look is not self._first and look.host.hello is not None
            if is_peer and can_reach and not look.is_reach_asked:
                self._ask_reach(look)
            is_reach_to_come = is_peer and self._listening is None and not self._first.is_done
            began = look.host.link.connecting_at
            is_late = began is not None and now - began > self._settings.timeout_s
            if (look.host.hello is not None and not look.waiting_for and not is_reach_to_come) or is_late:
                if look.host.hello is None:
                    look.problem = f"no agent answered within {self._settings.timeout_s:g} s"
                look.is_done = True

    def _ask_reach(self, look: _Look) -> None:
        if not self._candidates:
            self._candidates = tuple(self._find_candidates())
        look.is_reach_asked = True
        look.waiting_for.add("reach")
        timeout_s = min(REACH_TIMEOUT_S, self._settings.timeout_s * PROGRAM_MARGIN_S)
        look.host.send(Reach(list(self._candidates), self._settings.port, self._token, timeout_s))

    def _find_candidates(self) -> list[str]:
        """List the addresses of node 0 that a job would try, in the order of the tries."""
        hello = self._first.host.hello
        if hello is None or self._listening is None:
            raise AssertionError("node 0 is asked for its addresses before it listens")
        addresses = [look.host.link.local_address for look in self._looks.values() if look is not self._first]
        default = master_address(
            is_one_machine=all(look.host.plan.is_local for look in self._looks.values()),
            reached_at=hello.reached_at,
            address_to_peers=next((one for one in addresses if one), ""),
            hostname=hello.hostname,
        )
        return candidates_of(default, self._listening.addresses, (hello.hostname, self._first.host.name))

    def _facts_of(self, look: _Look) -> HostFacts:
        host = look.host.plan.host
        return HostFacts(
            name=host.name,
            node_rank=look.host.plan.node_rank,
            num_slots=look.num_slots,
            devices=look.host.plan.devices,
            python=self._python_of(host) or "the Python found there",
            cwd=host.cwd or self._settings.cwd,
            problem=look.problem,
            answers=look.answers,
            wrong=tuple(look.wrong),
            unanswered=() if look.problem else tuple(sorted(look.waiting_for)),
            clock_offset_s=look.clock_offset_s,
            clock_error_s=look.clock_error_s if look.clock_offset_s is not None else 0.0,
            reach=look.reach,
        )


def _nvml_program() -> str:
    data = pkgutil.get_data(__package__, "nvml_program.py")
    if data is None:
        raise AssertionError("nvml_program.py is missing from the package")
    return data.decode()


def wall_minus_monotonic(wall: Callable[[], float] = time.time) -> tuple[float, float]:
    """Return the difference between this process's wall clock and its monotonic clock, and its error, both in
    seconds.

    A process that reads two clocks may have to wait for the processor in between, so of several pairs the
    one read in the shortest time counts. The wall clock counts from 1970; a float of that size is exact to a
    quarter of a microsecond, which is added to the error.
    """
    best = (0.0, float("inf"))
    for _ in range(NUM_CLOCK_SAMPLES):
        before, at, after = time.monotonic(), wall(), time.monotonic()
        error_s = (after - before) / 2 + math.ulp(at)
        if error_s < best[1]:
            best = (at - (before + after) / 2, error_s)
    return best

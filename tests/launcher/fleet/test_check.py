"""A look at hosts that are channels in this process: honest ones, and all kinds that are not."""

from __future__ import annotations

import io
import os
import sys
import time
from typing import Any

import pytest

from dslaunch.launcher.controller.roster import Roster
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.fleet import check
from dslaunch.launcher.fleet.check import Check, CheckSettings, wall_minus_monotonic
from dslaunch.launcher.fleet.check_facts import ClusterFacts, HostFacts
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.wire.frames import (
    MAGIC,
    Facts,
    Frame,
    Inspect,
    Listen,
    Listening,
    Reach,
    Reached,
)
from tests.launcher.memory_host import Change, MemoryHost, after, first, plan_of, way_to

TIMEOUT_S = 30.0


def look(*hosts: MemoryHost | Exception, timeout_s: float = TIMEOUT_S, **changed: Any) -> ClusterFacts:
    given: dict[str, Any] = {
        "python": sys.executable, "cwd": os.getcwd(), "port": 29500, "is_port_fixed": False,
        "asks_torch": False, "timeout_s": timeout_s, **changed,
    }  # fmt: skip
    nodes = plan_of(len(hosts), slots=1).nodes
    console = Console(log_level="error", out=io.BytesIO(), err=io.BytesIO())
    check = Check(nodes, [1] * len(nodes), CheckSettings(**given), connect=way_to(hosts), console=console)
    facts = check.run()
    assert all(host.is_closed for host in hosts if isinstance(host, MemoryHost))
    return facts


def assert_good(host: HostFacts) -> None:
    assert (host.problem, host.wrong, host.unanswered) == ("", (), ())
    assert host.answers.keys() == {"system", "shm", "tmp", "cwd", "link", "python", "gpu", "nvml"}
    assert host.clock_offset_s is not None
    assert abs(host.clock_offset_s) <= host.clock_error_s


def silent_about(question: str) -> Change:
    return lambda frame: [] if isinstance(frame, Inspect) and frame.question == question else None


def instead_of(question: str, facts: Any) -> Change:
    """Another answer to one question."""

    def change(frame: Frame | None) -> list[Frame | bytes] | None:
        if isinstance(frame, Inspect) and frame.question == question:
            return [facts if isinstance(facts, bytes) else Facts(question, facts)]
        return None

    return change


def test_every_honest_host_has_all_its_answers() -> None:
    facts = look(MemoryHost(), MemoryHost(), MemoryHost())
    for host in facts.hosts:
        assert_good(host)
    assert facts.candidates == ("10.0.0.1", "memory", "n0")
    assert [host.reach for host in facts.hosts] == [None, ("", "", ""), ("", "", "")]


def test_what_one_host_does_wrong_is_its_own() -> None:
    facts = look(
        MemoryHost(),
        LaunchError("n1 port 22 refused the connection"),
        OSError(113, "No route to host"),
        MemoryHost(change=first(b"Welcome!\n", MAGIC, b"\xff\xff\xff\xff")),
        MemoryHost(change=instead_of("cwd", {"problem": 7})),
        MemoryHost(change=instead_of("cwd", b"\0\0\0\2[]")),
        MemoryHost(change=instead_of("system", b"")),
        MemoryHost(change=instead_of("gpu", {"error": "OSError: broken"})),
        MemoryHost(change=after(Reach, Reached([]))),
        MemoryHost(),
    )
    assert_good(facts.hosts[0])
    assert_good(facts.hosts[9])
    assert [host.problem for host in facts.hosts[1:4]] == [
        "n1 port 22 refused the connection",
        "the connection broke: No route to host",
        "not a frame: b'\\xff\\xff\\xff\\xff' would have 4294967295 bytes; at most 67108864 are allowed",
    ]
    assert facts.hosts[4].wrong == (("cwd", "problem is 7"),)
    assert facts.hosts[5].problem.startswith("not a frame: ")
    assert facts.hosts[6].problem == "the connection ended before the job did"
    assert facts.hosts[7].wrong == (("gpu", "OSError: broken"),)
    assert facts.hosts[8].reach == ("was not tried",) * 3


@pytest.mark.slow
def test_a_question_that_is_never_answered_leaves_the_other_answers() -> None:
    """As with a folder on a file server that is down."""
    began = time.monotonic()
    facts = look(MemoryHost(), MemoryHost(change=silent_about("cwd")), timeout_s=1.0)
    assert time.monotonic() - began < 10
    assert_good(facts.hosts[0])
    assert facts.hosts[1].unanswered == ("cwd",)
    assert facts.hosts[1].answers.keys() == {"system", "shm", "tmp", "link", "python", "gpu", "nvml"}


@pytest.mark.slow
def test_an_agent_that_never_says_hello_is_given_up() -> None:
    facts = look(MemoryHost(), MemoryHost(change=first(b"Password: ")), timeout_s=3)
    assert_good(facts.hosts[0])
    assert facts.hosts[1].problem == "no agent answered within 3 s"


def test_a_clock_that_is_wrong_is_measured() -> None:
    facts = look(MemoryHost(), MemoryHost(change=instead_of("clock", {"time": time.time() + 100})))
    offset = facts.hosts[1].clock_offset_s
    assert offset is not None
    assert 95 < offset < 105


def test_a_port_that_is_in_use_is_not_tried_but_its_owner_is_asked() -> None:
    def change(frame: Frame | None) -> list[Frame | bytes] | None:
        if isinstance(frame, Listen):
            return [Listening(frame.port, [], "port 29500 is in use")]
        return None

    facts = look(
        MemoryHost(change=lambda f: change(f) or instead_of("port_owner", {"owner": "x (process 7)"})(f)),
        MemoryHost(),
    )
    assert facts.listening_problem == "port 29500 is in use"
    assert facts.hosts[0].answers["port_owner"] == {"owner": "x (process 7)"}
    assert facts.hosts[1].reach is None
    assert facts.candidates == ()


def test_without_node_0_nobody_waits_for_it() -> None:
    facts = look(LaunchError("gone"), MemoryHost())
    assert_good(facts.hosts[1])
    assert facts.hosts[1].reach is None


def test_one_host_has_nobody_to_reach_it() -> None:
    facts = look(MemoryHost())
    assert_good(facts.hosts[0])
    assert facts.candidates == ()


@pytest.mark.slow
def test_a_host_that_falls_silent_is_lost_and_the_roster_ends_without_it() -> None:
    hosts = [MemoryHost(change=lambda frame: [] if frame else None), MemoryHost()]
    events = []
    with Roster(
        plan_of(2, slots=1).nodes, connect=way_to(hosts), silence_s=3.0, hello_timeout_s=30.0
    ) as roster:
        deadline = time.monotonic() + TIMEOUT_S
        while not any(type(one.item).__name__ == "LinkEnd" for one in events):
            assert time.monotonic() < deadline
            event = roster.next(0.05)
            events += [event] if event is not None else []
    assert events[-1].host.plan.node_rank == 0, "the other one answers pings"
    assert "nothing heard for 3 s; the host, its network or its agent is down" in str(events[-1].item)


def test_the_two_clocks_may_be_read_apart() -> None:
    """A thread that has to wait between the two readings says so in the error instead of moving
    every host's clock.
    """
    waits_s = iter([0.05, 0.05, 0.0, 0.0, 0.05])

    def wall() -> float:
        until = time.monotonic() + next(waits_s)
        while time.monotonic() < until:
            pass
        return time.time() + 100

    truth_s, truth_error_s = wall_minus_monotonic()
    offset_s, error_s = wall_minus_monotonic(wall)
    assert abs(offset_s - 100 - truth_s) <= error_s + truth_error_s
    assert error_s < 0.02


def test_what_the_two_clocks_may_be_off_is_part_of_every_hosts_error(monkeypatch: pytest.MonkeyPatch) -> None:
    offset_s, error_s = wall_minus_monotonic()
    monkeypatch.setattr(check, "wall_minus_monotonic", lambda: (offset_s + 0.5, 0.5 + error_s))
    for host in look(MemoryHost(), MemoryHost()).hosts:
        assert_good(host)

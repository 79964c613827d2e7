"""A job on hosts that are channels in this process: what one host does wrong is that host's failure,
and no other host's.
"""

from __future__ import annotations

import io
import json
import threading
import time

import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.controller import controller, roster
from dslaunch.launcher.controller.controller import Controller
from dslaunch.launcher.controller.link import LinkEnd
from dslaunch.launcher.controller.roster import HostState
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.job.verdict import HostFailure, RankFailure, Verdict
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.wire.frames import (
    MAGIC,
    Done,
    Exited,
    Frame,
    Hello,
    Listen,
    Listening,
    Output,
    Ping,
    Pong,
    Prepare,
    Problem,
    Reach,
    Reached,
    Ready,
    Stacks,
    Start,
    Started,
    Stop,
)
from tests.launcher.memory_host import HELLO, Change, MemoryHost, after, first, plan_of, way_to

WITHIN_S = 20.0  # every job here ends in well below a second on an idle machine


def run(*hosts: MemoryHost | Exception, heartbeat_s: float = 60.0) -> tuple[Verdict, str]:
    """The verdict on a job on these hosts, and what was said; hosts that a job has done with are closed."""
    err = io.BytesIO()
    console = Console(log_level="info", out=io.BytesIO(), err=err)
    plan = plan_of(len(hosts), heartbeat_s=heartbeat_s)
    began = time.monotonic()
    verdict = Controller(plan, connect=way_to(hosts), console=console).run()
    assert time.monotonic() - began < WITHIN_S
    console.report(verdict, took_s=1.0)
    console.drain()
    assert all(host.is_closed for host in hosts if isinstance(host, MemoryHost))
    return verdict, err.getvalue().decode()


UP = [Started(2, 102), Started(3, 103)]
WRONG = [  # of the host with ranks 2 and 3
    (LaunchError("n1 port 22 refused the connection"), "n1 port 22 refused the connection"),
    (OSError(113, "No route to host"), "the connection broke: No route to host"),
    (first(MAGIC, b"\xff\xff\xff\xff"),
     "not a frame: b'\\xff\\xff\\xff\\xff' would have 4294967295 bytes; at most 67108864 are allowed"),
    (first(b"Welcome!\n", b""),
     "no agent started there: the connection ended, and its last words are 'Welcome!'; a command"),
    (first(MAGIC, b"\0\0\0\2[]"), "not a frame: b'[]'"),
    (first(MAGIC, b"\0\0\0\x0b[\"Done\",{}]"), "not a frame: b'[\"Done\",{}]'"),
    (first(MAGIC, Ready(0, [])), "its agent sent Ready before Hello"),
    (first(MAGIC, Done(0)), "its agent sent Done before the start"),
    (first(MAGIC, HELLO, Done(0)), "its agent sent Done before the start"),
    (first(MAGIC, HELLO, Exited(2, 0, 0, 1.0)), "its agent sent Exited before the start"),
    (first(MAGIC, HELLO, Output(2, 1, "x\n")), "its agent sent Output before the start"),
    (after(Prepare, Started(2, 102)), "its agent sent Started before the start"),
    (after(Prepare, Start("here", 1)), "its agent sent Start, which only a launcher sends"),
    (after(Prepare, Ready(70000, [])), "its agent sent Ready with port 70000"),
    (after(Prepare, Problem("no", 0)), "its agent sent Problem with exit code 0"),
    (after(Prepare, Problem("no space left", 3)), "no space left"),
    (after(Reach, Listening(1, ["10.0.0.7"], "")), "its agent sent Listening, but it is not the first host"),
    (after(Reach, Reached([])),
     "cannot reach n0, where rank 0 will listen on port 29500: 10.0.0.1 was not tried"),
    (after(Start, Started(0, 100)), "its agent sent Started with rank 0, which is not on this host"),
    (after(Start, *UP, Exited(9, 0, 0, 1.0)), "its agent sent Exited with rank 9, which is not on this host"),
    (after(Start, *UP, Exited(2, 256, 0, 1.0)), "its agent sent Exited with exit code 256"),
    (after(Start, *UP, Output(0, 1, "x\n")), "its agent sent Output with rank 0, which is not on this host"),
    (after(Start, *UP, Output(2, 3, "x\n")), "its agent sent Output with stream 3"),
    (after(Start, *UP, Stacks(0, "", "", "")),
     "its agent sent Stacks with rank 0, which is not on this host"),
    (after(Start, *UP, Done(0)), "its agent sent Done, but 2 of its workers did not end"),
    (after(Start, *UP, b""), "the connection ended before the job did"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "reason"), WRONG, ids=[reason for _, reason in WRONG])
def test_what_one_host_does_wrong_is_its_own_failure_and_ends_the_job(
    wrong: Change | Exception, reason: str
) -> None:
    hosts = [
        MemoryHost((0, 1), code=None),
        wrong if isinstance(wrong, Exception) else MemoryHost((2, 3), wrong),
        MemoryHost((4, 5), code=None),
    ]
    verdict, said = run(*hosts)
    assert verdict.exit_code == 3
    assert isinstance(verdict.culprit, HostFailure)
    assert verdict.culprit.host == "n1"
    assert verdict.culprit.message.startswith(reason)
    assert verdict.others == ()
    assert f"dslaunch: n1: {reason}" in said
    has_started = any(isinstance(one, Start) for one in hosts[0].heard)  # type: ignore[union-attr]
    for host in (hosts[0], hosts[2]):
        assert isinstance(host, MemoryHost)
        assert not has_started or any(isinstance(one, Stop) for one in host.heard)


def test_all_hosts_that_do_wrong_are_in_one_report() -> None:
    verdict, said = run(
        MemoryHost((0, 1)),
        LaunchError("n1 port 22 refused the connection"),
        MemoryHost((4, 5), first(MAGIC, b"\0\0\0\2[]")),
        MemoryHost((6, 7), first(MAGIC, HELLO, Done(0))),
        MemoryHost((8, 9)),
    )
    assert verdict.exit_code == 3
    assert sorted(line.split(": ")[1] for line in said.splitlines()) == ["n1", "n2", "n3"]


class LateHost(MemoryHost):
    """Says its first word when another host is done with, and takes its time to prepare,
    unless it is told to stop.
    """

    def __init__(self, other: MemoryHost, ranks: tuple[int, ...], problem: Problem) -> None:
        super().__init__(ranks, lambda frame: [] if isinstance(frame, Prepare) else None)
        self._other = other
        self._problem = problem

    def read(self) -> bytes:
        deadline = time.monotonic() + WITHIN_S
        while not self._other.is_closed and time.monotonic() < deadline:
            time.sleep(0.01)
        return super().read()

    def write(self, data: bytes) -> None:
        super().write(data)
        if any(isinstance(one, Prepare) for one in self.heard) and not self._is_preparing:
            self._is_preparing = True
            threading.Timer(0.3, self._prepared).start()

    _is_preparing = False

    def _prepared(self) -> None:
        if not any(isinstance(one, Stop) for one in self.heard):
            self._say([self._problem])


def test_a_host_that_comes_after_another_has_failed_is_heard_too() -> None:
    problem = Problem("no Python at /own/python3", 3)
    early = MemoryHost((2, 3), after(Prepare, problem))
    verdict, said = run(MemoryHost((0, 1)), early, LateHost(early, (4, 5), problem))
    assert verdict.exit_code == 3
    assert said.splitlines() == ["dslaunch: n[1-2]: no Python at /own/python3 (2 hosts)"]


def test_hosts_that_end_long_after_the_launcher_stood_still_are_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were left alone for longer than a heartbeat: how late one is heard to end says
    nothing against it.
    """
    heartbeat_s = 0.3

    def is_gone(frame: Frame | None) -> list[Frame | bytes] | None:
        if isinstance(frame, Stop):
            threading.Timer(2 * heartbeat_s, ending._say, ([b""],)).start()
        return [] if isinstance(frame, Stop) else None

    silent = MemoryHost((0, 1), lambda frame: [] if isinstance(frame, (Stop, Ping)) else None, code=None)
    ending = MemoryHost((2, 3), is_gone, code=None)
    honest = roster.Roster.forgive_standstill
    gaps = iter([2 * heartbeat_s])

    def stood_still(self: roster.Roster) -> float:
        has_started = all(any(isinstance(one, Start) for one in host.heard) for host in (silent, ending))
        return next(gaps, 0.0) if has_started else honest(self)

    monkeypatch.setattr(roster.Roster, "forgive_standstill", stood_still)
    verdict, said = run(silent, ending, heartbeat_s=heartbeat_s)
    assert verdict.exit_code == 3
    assert verdict.others == ()
    assert "this machine stood still for 1 s" in said
    assert "dslaunch: n" not in said


def test_the_end_of_a_host_may_be_the_first_that_is_heard_after_a_standstill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The standstill is over while the launcher waits for news: it has looked for one before."""
    heartbeat_s = 0.3
    heard: list[object] = []
    gaps = iter([2 * heartbeat_s])
    handle = Controller._handle

    def hear(self: Controller, host: HostState, item: Frame | LinkEnd, at_s: float) -> None:
        heard.append(item)
        handle(self, host, item, at_s)

    def stood_still(self: roster.Roster) -> float:
        return next(gaps, 0.0) if any(isinstance(one, LinkEnd) for one in heard) else 0.0

    monkeypatch.setattr(Controller, "_handle", hear)
    monkeypatch.setattr(roster.Roster, "forgive_standstill", stood_still)
    ending = MemoryHost((2, 3), after(Start, *UP, b""), code=None)
    verdict, said = run(MemoryHost((0, 1), code=None), ending, heartbeat_s=heartbeat_s)
    assert verdict.exit_code == 3
    assert "this machine stood still for 1 s" in said
    assert "dslaunch: n" not in said


def test_an_answer_that_was_not_asked_for_changes_nothing() -> None:
    """The look for the master address is over when all have answered,
    not when one has answered often enough.
    """
    early: list[Frame | bytes] = [Reached([]), Reached(["x"]), Ready(29500, [])]
    verdict, _ = run(
        MemoryHost((0, 1), after(Listen, *[Listening(29500, ["10.0.0.1"], "")] * 3)),
        MemoryHost((2, 3), after(Prepare, *early)),
        MemoryHost((4, 5), after(Prepare, *early)),
    )
    assert verdict.exit_code == 0
    assert verdict.culprit is None


def test_a_host_that_has_very_much_to_say_is_cut_off() -> None:
    notes = [f"note {number} {'x' * 5000}" for number in range(5000)]
    verdict, said = run(MemoryHost((0, 1), after(Prepare, Ready(29500, notes))))
    assert verdict.exit_code == 0
    assert "n0: note 0 x" in said
    assert "n0: 4984 more notes are not shown" in said
    assert len(said) < 100_000


def test_evidence_of_another_form_says_nothing_and_the_rest_is_told() -> None:
    evidence = {"evidence": ["it was the disk", 7], "last_lines": "x", "host": "n9", "message": "out of luck"}
    verdict, said = run(
        MemoryHost((0, 1), code=None),
        MemoryHost((2, 3), after(Start, *UP, Exited(2, 5, 0, time.monotonic(), evidence))),
    )
    assert isinstance(verdict.culprit, RankFailure)
    assert (verdict.culprit.host, verdict.culprit.code, verdict.culprit.message) == ("n1", 5, "out of luck")
    assert (verdict.culprit.evidence, verdict.culprit.last_lines) == ((), ())
    assert "rank 2 on n1 (local rank 0, pid 102) exited with code 5; it failed first" in said


def test_a_host_that_falls_silent_is_lost_and_the_others_are_stopped() -> None:
    other = MemoryHost((0, 1), code=None)
    verdict, _ = run(other, MemoryHost((2, 3), lambda frame: [] if frame else None), heartbeat_s=0.5)
    assert verdict.exit_code == 3
    assert isinstance(verdict.culprit, HostFailure)
    assert verdict.culprit.message.startswith("nothing heard for ")


@pytest.mark.slow
def test_a_login_that_never_becomes_an_agent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "HELLO_TIMEOUT_S", 0.3)
    asking = MemoryHost((2, 3), lambda frame: [b"Password: "] if frame is None else [])
    silent = MemoryHost((4, 5), lambda frame: [MAGIC] if frame is None else [])
    verdict, _ = run(MemoryHost((0, 1)), asking, silent)
    assert verdict.exit_code == 3
    failed = [one for one in (verdict.culprit, *verdict.others) if isinstance(one, HostFailure)]
    assert sorted(one.host for one in failed) == ["n1", "n2"]
    assert all(one.message.startswith("connected, but no agent answered within 0.3 s") for one in failed)


words = st.text(max_size=5)
any_frame = st.one_of(
    st.builds(Hello, words, words, words, st.integers(), st.integers()),
    st.builds(Ready, st.integers(-1, 70000), st.lists(words, max_size=2)),
    st.builds(Listening, st.integers(-1, 70000), st.lists(words, max_size=2), words),
    st.builds(Reached, st.lists(words, max_size=2)),
    st.builds(Problem, words, st.integers(-1, 300)),
    st.builds(Started, st.integers(-1, 4), st.integers()),
    st.builds(Output, st.integers(-1, 4), st.integers(0, 3), words),
    st.builds(Exited, st.integers(-1, 4), st.integers(-1, 300), st.integers(-1, 70), st.floats(-1e9, 1e9),
              st.just({})),
    st.builds(Stacks, st.integers(-1, 4), words, words, words),
    st.builds(Pong, st.integers(), st.floats(-1e9, 1e9)),
    st.builds(Done, st.integers()),
    st.binary(min_size=1, max_size=8),
    st.lists(st.integers() | st.text(max_size=3), max_size=3).map(lambda one: framed(one)),
)  # fmt: skip


def framed(value: object) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(4, "big") + body


@pytest.mark.slow
@settings(max_examples=60)
@given(kind=st.sampled_from([Ping, Prepare, Reach, Start]), said=st.lists(any_frame, max_size=6))
def test_whatever_a_host_says_ends_in_a_verdict(kind: type, said: list[Frame | bytes]) -> None:
    """It says so and then its stream ends; the others are honest."""
    others = [MemoryHost((0, 1)), MemoryHost((4, 5))]
    verdict, _ = run(others[0], MemoryHost((2, 3), after(kind, *said, b"")), others[1])
    failed = [one for one in (verdict.culprit, *verdict.others) if one is not None]
    assert verdict.exit_code == 0 or failed
    assert all(one.host == "n1" for one in failed if isinstance(one, HostFailure | RankFailure))


def test_a_first_host_that_is_lost_when_it_is_ready_and_does_not_listen_ends_the_wait_of_all() -> None:
    def dies(frame: Frame | None) -> list[Frame | bytes] | None:
        if isinstance(frame, Ping) and frame.number > 3:  # all others are ready by then
            return [b""]
        return [] if isinstance(frame, Listen) else None

    hosts = [MemoryHost((2 * one, 2 * one + 1), code=None) for one in (1, 2)]
    verdict, said = run(MemoryHost((0, 1), dies), *hosts, heartbeat_s=1.0)
    assert verdict.exit_code == 3
    assert isinstance(verdict.culprit, HostFailure)
    assert verdict.culprit.host == "n0"
    assert "n0: the connection ended before the job did" in said


@pytest.mark.parametrize(
    ("place", "change"), [(0, after(Listen)), (1, after(Reach))], ids=["does not listen", "does not try"]
)
def test_a_host_that_lives_but_does_not_answer_is_given_up(
    place: int, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "ANSWER_TIMEOUT_S", 0.3)
    hosts = [MemoryHost((2 * one, 2 * one + 1), code=None) for one in range(3)]
    hosts[place] = MemoryHost((2 * place, 2 * place + 1), change)
    verdict, said = run(*hosts)
    assert verdict.exit_code == 3
    assert f"n{place}: its agent did not answer within 0.3 s, and the job waits for all to be reached" in said
    assert said.count("did not answer within") == 1


@pytest.mark.parametrize("place", [1, 2])
def test_one_machine_under_two_names_is_refused_before_anything_starts(place: int) -> None:
    hello = first(MAGIC, HELLO._replace(hostname="box", machine="boot-7 box"))
    hosts = [MemoryHost((2 * one, 2 * one + 1), code=None) for one in range(3)]
    for one in (0, place):
        hosts[one] = MemoryHost((2 * one, 2 * one + 1), hello, code=None)
    verdict, said = run(*hosts)
    assert verdict.exit_code == 2
    names = {f"n0 and n{place}", f"n{place} and n0"}
    assert any(
        f"{pair} are one machine, box, and both have slot 0, 1; give a machine one" in said for pair in names
    )
    assert not any(isinstance(frame, Start) for host in hosts for frame in host.heard)


def test_a_host_that_does_not_say_which_machine_it_is_takes_part() -> None:
    verdict, _ = run(*(MemoryHost((2 * one, 2 * one + 1)) for one in range(2)))
    assert verdict.exit_code == 0

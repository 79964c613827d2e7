"""A change of hosts while a job runs, on hosts that are channels in this process."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import pytest

from dslaunch.launcher.controller import resizing
from dslaunch.launcher.controller.controller import Controller
from dslaunch.launcher.job.verdict import HostFailure, RankFailure, Verdict
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.wire.frames import (
    Done,
    Exited,
    Frame,
    Leaving,
    Note,
    Resize,
    Start,
    Started,
    Stop,
)
from tests.launcher.memory_host import Change, MemoryHost, plan_of, way_to

WHY = "n1 was told to go (x)"


class Watch:
    """Wants other hosts when one leaves, or always. `then` is done when it was asked for the eighth time."""

    def __init__(self, always: str = "", then: Callable[[], None] = lambda: None) -> None:
        self.heard: list[dict[str, str]] = []
        self._always, self._then = always, then

    def why_change(self, leaving: Mapping[str, str]) -> str:
        self.heard.append(dict(leaving))
        if len(self.heard) == 8:
            self._then()
        return self._always or ", ".join(f"{name} was told to go ({why})" for name, why in leaving.items())


def run(*hosts: MemoryHost, watch: Watch | None, kill_grace_s: float = 0.0) -> tuple[Verdict, str]:
    err = io.BytesIO()
    console = Console(log_level="info", out=io.BytesIO(), err=err)
    plan = plan_of(len(hosts), slots=1, kill_grace_s=kill_grace_s)
    verdict = Controller(plan, connect=way_to(hosts), console=console, watch=watch).run()
    console.report(verdict, took_s=1.0)
    console.drain()
    return verdict, err.getvalue().decode()


def saving(rank: int, *first: Frame, code: int = 75) -> Change:
    """Starts, says these, and ends with the code when it is asked to."""

    def answer(frame: Frame | None) -> list[Frame | bytes] | None:
        if isinstance(frame, Start):
            return [Started(rank, 100 + rank), *first]
        if isinstance(frame, Resize):
            return [Exited(rank, code, 0, 1.0), Done(0)]
        return None

    return answer


def test_when_one_is_told_to_go_all_are_asked_and_end() -> None:
    hosts = MemoryHost((0,), saving(0)), MemoryHost((1,), saving(1, Leaving("x")))
    watch = Watch()
    verdict, said = run(*hosts, watch=watch, kill_grace_s=5.0)
    assert (verdict.exit_code, verdict.change, dict(verdict.leaving)) == (75, WHY, {"n1": "x"})
    assert verdict.culprit is None
    assert watch.heard[-1] == {"n1": "x"}
    for host in hosts:
        assert [one.why for one in host.heard if isinstance(one, Resize)] == [WHY]
        assert not any(isinstance(one, Stop) for one in host.heard)
    assert f"{WHY}: the hosts change when the program has saved its next checkpoint" in said


def test_a_second_host_that_goes_is_a_second_question() -> None:
    def late(frame: Frame | None) -> list[Frame | bytes] | None:
        if isinstance(frame, Resize) and "n0" not in frame.why:
            return [Leaving("y")]
        return saving(0)(frame)

    hosts = MemoryHost((0,), late), MemoryHost((1,), lambda frame: only_two(frame))
    verdict, _ = run(*hosts, watch=Watch())
    assert verdict.change == "n1 was told to go (x), n0 was told to go (y)"


def only_two(frame: Frame | None) -> list[Frame | bytes] | None:
    return [] if isinstance(frame, Resize) and "n0" not in frame.why else saving(1, Leaving("x"))(frame)


@pytest.mark.parametrize("watch", [None, Watch()])
def test_code_75_without_a_question_is_a_failure(watch: Watch | None) -> None:
    def ends(frame: Frame | None) -> list[Frame | bytes] | None:
        return [Started(0, 100), Exited(0, 75, 0, 1.0), Done(0)] if isinstance(frame, Start) else None

    verdict, said = run(MemoryHost((0,), ends), MemoryHost((1,), code=None), watch=watch)
    assert isinstance(verdict.culprit, RankFailure)
    assert (verdict.exit_code, verdict.change) == (75, "")
    assert "evidence: code 75 says that it saved and ended for a change of hosts, and it was not" in said


def test_another_code_is_a_failure_though_they_were_asked() -> None:
    hosts = MemoryHost((0,), saving(0, code=7)), MemoryHost((1,), saving(1, Leaving("x")))
    verdict, _ = run(*hosts, watch=Watch())
    assert (verdict.exit_code, verdict.change) == (7, "")
    assert isinstance(verdict.culprit, RankFailure)
    assert verdict.culprit.host == "n0"


def test_a_host_that_is_lost_before_the_save_is_told_to_go_all_the_same() -> None:
    def lost(frame: Frame | None) -> list[Frame | bytes] | None:
        if isinstance(frame, Start):
            return [Started(1, 101), Leaving("x")]
        return [b""] if isinstance(frame, Resize) else None

    verdict, _ = run(
        MemoryHost((0,), lambda frame: [] if isinstance(frame, Resize) else None, code=None),
        MemoryHost((1,), lost),
        watch=Watch(),
    )
    assert isinstance(verdict.culprit, HostFailure)
    assert (verdict.culprit.host, dict(verdict.leaving), verdict.change) == ("n1", {"n1": "x"}, "")


def test_who_does_not_end_with_the_others_is_stopped() -> None:
    stays = MemoryHost((0,), lambda frame: [] if isinstance(frame, Resize) else None, code=None)
    verdict, said = run(stays, MemoryHost((1,), saving(1, Leaving("x"))), watch=Watch(), kill_grace_s=0.1)
    assert (verdict.exit_code, verdict.change) == (75, WHY)
    assert any(isinstance(one, Stop) for one in stays.heard)
    assert "1 workers did not end within --kill_grace=0.1 s of the first that ended with code 75" in said


@pytest.mark.slow
def test_a_program_that_never_saves_goes_on_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "PATIENCE_S", 0.3)

    def works(frame: Frame | None) -> list[Frame | bytes] | None:
        if isinstance(frame, Start):
            return [Started(0, 100), Note("something")]
        return [] if isinstance(frame, Resize) else None

    host = MemoryHost((0,), works)
    watch = Watch("n2 is back", then=lambda: host._say([Exited(0, 0, 0, 1.0), Done(0)]))
    verdict, said = run(host, watch=watch)
    assert (verdict.exit_code, verdict.change) == (0, "")
    assert (
        "warning: the program has saved no checkpoint for 0.005 minutes since it was asked (n2 is b" in said
    )
    assert "warning: n0: something" in said
    assert said.count("the hosts change when the program has saved its next checkpoint") == 1


class Asked:
    """Hosts that only hear what is asked of them."""

    def __init__(self, num_hosts: int) -> None:
        nodes = enumerate(plan_of(num_hosts).nodes)
        self.hosts = [SimpleNamespace(name=f"n{number}", plan=node) for number, node in nodes]
        self.heard: list[Resize] = []

    def __iter__(self) -> Iterator[SimpleNamespace]:
        return iter(self.hosts)

    def send(self, frame: Resize) -> None:
        self.heard.append(frame)


def test_where_a_host_and_its_partner_go_together_memory_is_not_enough() -> None:
    """Of four hosts without racks the one that is two places away has the copy."""
    err, asked = io.BytesIO(), Asked(4)
    console = Console(log_level="info", out=io.BytesIO(), err=err)
    plan = plan_of(4)._replace(snapshot_every="5")
    changing = resizing.Resizing(asked, console, Watch(), plan)  # type: ignore[arg-type] # they only hear
    for number in (0, 1, 2):
        changing.hear(asked.hosts[number], Leaving("x"))  # type: ignore[arg-type] # as above
        changing.look(is_running=True)
    assert [one.by_disk for one in asked.heard] == [False, False, True]
    console.drain()
    said = err.getvalue().decode().splitlines()
    assert [line.endswith("its next checkpoint, or a snapshot") for line in said] == [True, True, False]

"""Agents that are kept for the next attempt, on hosts that are channels in this process."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Sequence

from dslaunch.launcher.backends.channel import Channel
from dslaunch.launcher.controller.controller import Controller
from dslaunch.launcher.controller.kept_agents import KeptAgents
from dslaunch.launcher.controller.lasting import Lasting
from dslaunch.launcher.job.verdict import RankFailure, Verdict
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.wire.frames import Done, Exited, Frame, Ping, Prepare, Renew, Start, Started, Stop
from tests.launcher.memory_host import MemoryHost, after, plan_of, way_to


def run(kept: KeptAgents, *hosts: Channel | Exception, heartbeat_s: float = 60.0) -> Verdict:
    """The verdict on one attempt on hosts that are connected where none is kept."""
    console = Console(log_level="info", out=io.BytesIO(), err=io.BytesIO())
    return Controller(
        plan_of(len(hosts), heartbeat_s=heartbeat_s),
        connect=way_to(hosts),
        console=console,
        lasting=Lasting(kept),
    ).run()


def kinds(host: MemoryHost, *wanted: type) -> Sequence[str]:
    return [type(one).__name__ for one in host.heard if isinstance(one, wanted)]


def rank_0_fails(frame: Frame | None) -> list[Frame | bytes] | None:
    """On the first host: the other rank runs until it is stopped."""
    if isinstance(frame, Start):
        return [Started(0, 100), Started(1, 101), Exited(0, 1, 0, time.monotonic())]
    return [Exited(1, 143, 15, time.monotonic()), Done(0)] if isinstance(frame, Stop) else None


def test_a_kept_agent_that_is_gone_when_it_is_needed_is_connected_as_ever() -> None:
    failing, leaving = MemoryHost((0, 1), rank_0_fails), MemoryHost((2, 3), after(Renew, b""), code=None)
    going = MemoryHost((4, 5), code=None)
    back = MemoryHost((2, 3), code=None), MemoryHost((4, 5), code=None)
    kept = KeptAgents(heartbeat_s=60.0)
    assert isinstance(run(kept, failing, leaving, going).culprit, RankFailure)
    assert not any(host.is_closed for host in (failing, leaving, going))
    going.close()  # as when its connection breaks
    assert isinstance(run(kept, AssertionError("it is kept"), *back).culprit, RankFailure)
    assert kinds(failing, Prepare, Renew, Start) == ["Prepare", "Start", "Renew", "Prepare", "Start"]
    assert [kinds(host, Prepare, Renew, Start) for host in back] == [["Prepare", "Start"]] * 2
    kept.close()
    assert all(host.is_closed for host in (failing, leaving, *back))


def test_an_agent_is_not_silent_while_the_workers_of_another_host_take_long_to_end() -> None:
    """It would count as lost when the next attempt begins, and take its snapshots along."""
    failing = MemoryHost((0, 1), rank_0_fails)

    def num_pings() -> int:
        return len(kinds(failing, Ping))

    def end_later(frame: Frame | None) -> list[Frame | bytes] | None:
        if not isinstance(frame, Stop):
            return None
        threading.Thread(target=end).start()
        return []

    def end() -> None:
        before, until = num_pings(), time.monotonic() + 10.0
        while num_pings() < before + 2 and time.monotonic() < until:
            time.sleep(0.01)
        heard.append(num_pings() - before)
        slow._say([Exited(rank, 143, 15, time.monotonic()) for rank in (2, 3)] + [Done(0)])

    heard: list[int] = []
    slow = MemoryHost((2, 3), end_later, code=None)
    kept = KeptAgents(heartbeat_s=60.0)
    assert isinstance(run(kept, failing, slow, heartbeat_s=4.0).culprit, RankFailure)
    assert heard[0] >= 2
    kept.close()

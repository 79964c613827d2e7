"""How a job ends on a host: who is asked, who is killed, and when it is over. The processes are real."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from dslaunch.launcher.node.system.process_tree import descendants, kill_descendants
from dslaunch.launcher.node.workers.ending import LEFT_OVER_GRACE_S, Ending
from dslaunch.launcher.node.workers.worker_group import WorkerGroup

TIMEOUT_S = 20.0
STUBBORN = "trap '' TERM; echo ready; sleep 600 & wait; wait"


def poll(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Workers:
    """What an ending knows of workers."""

    def __init__(self) -> None:
        self.is_ended = self.is_told = False
        self.did: list[object] = []

    def signal(self, *signums: int) -> None:
        self.did.append(signums)

    def collect(self, *, is_our_kill: bool) -> None:
        self.did.append(("collect", is_our_kill))


class Top:
    """A process with children, as the agent is, and the ending of a job below it."""

    def __init__(self, program: str) -> None:
        self.process = subprocess.Popen(["/bin/sh", "-c", program], stdout=subprocess.PIPE)
        self.workers = Workers()
        self.ending = Ending(cast(WorkerGroup, self.workers), top=self.process.pid)

    def below(self) -> list[int]:
        return descendants(self.process.pid)


@pytest.fixture
def top_of() -> Iterator[Callable[[str], Top]]:
    made: list[Top] = []

    def make(program: str) -> Top:
        made.append(Top(program))
        return made[-1]

    yield make
    for one in made:
        kill_descendants(one.process.pid)
        one.process.kill()
        one.process.communicate()


def test_workers_are_asked_first_and_killed_when_their_time_is_up(top_of: Callable[[str], Top]) -> None:
    top = top_of(f'sh -c "{STUBBORN}" & wait')
    poll(lambda: len(top.below()) == 2)
    before = time.monotonic()
    top.ending.begin(30.0)
    after = time.monotonic()
    assert top.workers.did == [(signal.SIGTERM, signal.SIGCONT)]
    assert not top.ending.go_on(before + 29.9)
    assert len(top.below()) == 2
    assert top.workers.did == [(signal.SIGTERM, signal.SIGCONT)]
    top.ending.go_on(after + 30.0)
    poll(lambda: top.below() == [])
    assert top.workers.did[1:] == [("collect", True)]


def test_it_is_over_when_no_process_is_left_and_all_was_reported(top_of: Callable[[str], Top]) -> None:
    top = top_of("read line")
    top.ending.begin(30.0)
    now = time.monotonic()
    assert not top.ending.go_on(now)
    top.workers.is_told = True
    assert top.ending.go_on(now)


def test_asking_again_can_only_shorten_it(top_of: Callable[[str], Top]) -> None:
    top = top_of("sleep 600 & wait")
    poll(lambda: len(top.below()) == 1)
    top.ending.begin(30.0)
    top.ending.hasten(3.0)
    top.ending.hasten(1000.0)
    after = time.monotonic()
    assert not top.ending.go_on(after + 2.5)
    assert len(top.below()) == 1
    top.ending.go_on(after + 3.0)
    poll(lambda: top.below() == [])


def test_once_the_workers_are_gone_what_they_left_gets_less_time(top_of: Callable[[str], Top]) -> None:
    top = top_of(f"sh -c \"{STUBBORN}\" & sh -c 'echo ready; exec sleep 600' & wait")
    poll(lambda: len(top.below()) == 3)
    out = top.process.stdout
    assert out is not None
    assert [out.readline(), out.readline()] == [b"ready\n"] * 2
    top.ending.begin(600.0)
    top.workers.is_ended = True
    now = time.monotonic()
    assert not top.ending.go_on(now)
    poll(lambda: len(top.below()) < 3)  # who does not ignore SIGTERM
    assert not top.ending.go_on(now + LEFT_OVER_GRACE_S - 0.1)
    assert top.below() != []
    top.ending.go_on(now + LEFT_OVER_GRACE_S)
    poll(lambda: top.below() == [])


def test_what_workers_left_is_asked_however_short_the_grace_is(top_of: Callable[[str], Top]) -> None:
    """Else the loaders of data of a rank that was killed would hold up the next attempt."""
    top = top_of("echo ready; sleep 600 & wait")
    poll(lambda: len(top.below()) == 1)
    top.ending.begin(LEFT_OVER_GRACE_S / 2)
    top.workers.is_ended = True
    assert not top.ending.go_on(time.monotonic())
    poll(lambda: top.below() == [])


def test_what_outlives_the_last_worker_is_counted_asked_and_then_killed(top_of: Callable[[str], Top]) -> None:
    top = top_of(f"trap '' TERM; {STUBBORN}")
    out = top.process.stdout
    assert out is not None
    assert out.readline() == b"ready\n"
    poll(lambda: len(top.below()) == 1)
    top.workers.is_ended = top.workers.is_told = True
    top.ending.begin_with_left_over()
    after = time.monotonic()
    assert top.ending.num_left_over == 1
    assert top.workers.did == [], "the workers themselves have ended"
    assert not top.ending.go_on(after)
    top.ending.go_on(after + LEFT_OVER_GRACE_S)
    poll(lambda: top.ending.go_on(time.monotonic()))


def test_a_job_that_leaves_nothing_is_over_at_once(top_of: Callable[[str], Top]) -> None:
    top = top_of("read line")
    top.workers.is_ended = top.workers.is_told = True
    top.ending.begin_with_left_over()
    assert top.ending.num_left_over == 0
    assert top.ending.go_on(time.monotonic())


def test_an_ending_that_was_not_told_otherwise_looks_below_this_process() -> None:
    assert Ending(cast(WorkerGroup, Workers()))._top == os.getpid()

"""What the workers of a host write and how they end, passed on: all of it, in order,
and slowly if it has to be.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from dslaunch.launcher.node.system.lean_stdlib import Selector
from dslaunch.launcher.node.workers import worker_group
from dslaunch.launcher.node.workers.milestones import MilestonePipe
from dslaunch.launcher.node.workers.worker import start_worker
from dslaunch.launcher.node.workers.worker_group import WorkerGroup
from dslaunch.launcher.wire.frames import Exited, Frame, Milestone, Output, Started


class Node:
    """A group whose workers are the two writing ends of pipes; a test writes and ends for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Frame] = []
        self.ended: list[tuple[int, int]] = []
        self.selector = Selector()
        self.group = WorkerGroup(self.selector, self.sent.append)
        self.ends: dict[tuple[int, int], int] = {}
        monkeypatch.setattr(worker_group, "reap", self._reap)
        self.group.begin(None)

    def _reap(self) -> list[tuple[int, int]]:
        ended, self.ended = self.ended, []
        return ended

    def add(self, rank: int) -> None:
        def start(out: int, err: int) -> int:
            self.ends[rank, 1], self.ends[rank, 2] = os.dup(out), os.dup(err)
            return 1000 + rank

        self.group.add(start_worker(rank, start))

    def write(self, rank: int, data: bytes, *, stream: int = 1) -> None:
        os.write(self.ends[rank, stream], data)

    def end(self, rank: int, status: int, *, is_closed: bool = True) -> None:
        if is_closed:
            for stream in (1, 2):
                os.close(self.ends.pop((rank, stream)))
        self.ended.append((1000 + rank, status))
        self.group.collect(is_our_kill=False)

    def act(self) -> None:
        self.selector.wait(0)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    one = Node(monkeypatch)
    yield one
    for fd in [*one.ends.values(), *one.selector]:
        os.close(fd)
    one.selector.close()


def kinds(frames: list[Frame]) -> list[str]:
    return [type(frame).__name__ for frame in frames]


def test_lines_are_passed_on_with_their_rank_and_stream(node: Node) -> None:
    node.add(3)
    node.write(3, b"one\ntw")
    node.write(3, b"oops\n", stream=2)
    node.act()
    assert node.sent == [Started(3, 1003), Output(3, 1, "one\n"), Output(3, 2, "oops\n")]


def test_all_that_a_worker_wrote_comes_before_its_end(node: Node) -> None:
    node.add(0)
    node.write(0, b"x" * 5000 + b"\nlast words")
    node.write(0, b"error\n", stream=2)
    node.end(0, 0)
    *outputs, exited = node.sent[1:]
    assert outputs == [Output(0, 1, "x" * 5000 + "\n"), Output(0, 1, "last words\n"), Output(0, 2, "error\n")]
    assert isinstance(exited, Exited)
    assert (exited.rank, exited.code, exited.signal, exited.evidence) == (0, 0, 0, {})
    assert node.group.is_told
    assert len([*node.selector]) == 0


def test_a_pipe_that_somebody_else_holds_open_does_not_delay_the_report(node: Node) -> None:
    node.add(0)
    node.write(0, b"mine\n")
    node.end(0, 0, is_closed=False)
    assert kinds(node.sent) == ["Started", "Output", "Exited"]
    assert len([*node.selector]) == 0


@pytest.mark.parametrize(
    ("status", "code", "signum"), [(3 << 8, 3, 0), (signal.SIGSEGV, 139, signal.SIGSEGV)]
)
def test_a_failure_comes_with_the_last_lines(node: Node, status: int, code: int, signum: int) -> None:
    node.add(0)
    node.write(0, b"why\n", stream=2)
    node.end(0, status)
    exited = node.sent[-1]
    assert isinstance(exited, Exited)
    assert (exited.code, exited.signal) == (code, signum)
    assert "why" in str(exited.evidence)


@pytest.mark.parametrize(("status", "is_raised"), [(1 << 8, True), (signal.SIGKILL, False)])
def test_a_worker_that_raised_failed_when_it_said_so(node: Node, status: int, is_raised: bool) -> None:
    """Python needs a moment to end, in which the ranks that have lost this one end."""
    node.add(0)
    node.write(0, b'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no\n', stream=2)
    node.act()
    read_at = time.monotonic()
    node.end(0, status)
    exited = node.sent[-1]
    assert isinstance(exited, Exited)
    assert (exited.at < read_at) is is_raised


def test_a_paused_group_reads_nothing_and_reports_no_end_before_it_goes_on(node: Node) -> None:
    node.add(0)
    node.add(1)
    node.group.pause(True)
    node.group.pause(True)
    node.write(0, b"early\n")
    node.act()
    node.end(0, 0)
    assert kinds(node.sent) == ["Started", "Started"]
    assert node.group.is_told is node.group.is_ended is False
    node.group.pause(False)
    node.group.pause(False)
    node.write(1, b"later\n")
    node.act()
    node.group.collect(is_our_kill=False)
    assert kinds(node.sent[2:]) == ["Output", "Output", "Exited"]
    node.end(1, 0)
    assert node.group.is_told


def test_a_group_paused_while_it_reports_goes_on_where_it_was(node: Node) -> None:
    """The launcher falls behind because of the very output that comes before the report."""
    node.add(0)
    send = node.sent.append

    def send_and_pause(frame: Frame) -> None:
        send(frame)
        node.group.pause(True)

    node.write(0, b"x" * 60_000 + b"\n")
    node.write(0, b"y\n", stream=2)
    node.group._send = send_and_pause
    node.end(0, 0)
    assert kinds(node.sent) == ["Started", "Output"]
    node.group._send = send
    node.group.pause(False)
    node.group.collect(is_our_kill=False)
    assert kinds(node.sent) == ["Started", "Output", "Output", "Exited"]


def test_an_empty_group_has_ended_and_was_reported(node: Node) -> None:
    assert node.group.is_ended
    assert node.group.is_told
    node.add(0)
    assert not node.group.is_ended
    assert not node.group.is_told
    node.end(0, 0)


def test_what_workers_tell_of_their_start_is_passed_on(node: Node, tmp_path: os.PathLike[str]) -> None:
    pipe = MilestonePipe(os.path.join(tmp_path, "timings"))
    node.group.begin(pipe)
    os.write(pipe.fileno(), b"2 1.5 group\n")
    node.act()
    assert node.sent == [Milestone(2, "group", 1.5)]

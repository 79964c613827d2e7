"""What arrives from one host: in order, together where it belongs together,
and never held up by another host.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from dslaunch.launcher.backends.channel import Channel
from dslaunch.launcher.controller.link import MAX_OUTPUTS_IN_FLIGHT, Link, LinkEnd
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.job.plan import NodePlan
from dslaunch.launcher.wire.frames import MAGIC, Done, Exited, Frame, Output, Pong, encode

TIMEOUT_S = 20.0


class MemoryChannel:
    """A host that sends what a test gives it; the stream ends when the launcher closes it."""

    local_address = ""

    def __init__(self) -> None:
        self.chunks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.chunks.put(MAGIC)

    def read(self) -> bytes:
        return self.chunks.get()

    def write(self, data: bytes) -> None:
        pass

    def error_text(self) -> str:
        return ""

    def exit_status(self) -> int | None:
        return None

    def close(self) -> None:
        self.chunks.put(b"")

    def say(self, *frames: Frame) -> None:
        self.chunks.put(b"".join(encode(one) for one in frames))


class Heard:
    """A link to a host in memory, and what it delivered."""

    def __init__(self, name: str = "w0") -> None:
        self.host = MemoryChannel()
        self.items: queue.SimpleQueue[Frame | LinkEnd] = queue.SimpleQueue()
        connect: Callable[[NodePlan], Channel] = lambda _: self.host  # noqa: E731
        self.link = Link(
            NodePlan(node_rank=0, host=Host(name=name, slots=1), is_local=True, devices=(), ranks=()),
            connect=connect,
            window=threading.BoundedSemaphore(1),
        )
        self.link.start(lambda item, at_s: self.items.put(item))

    def next(self) -> Frame | LinkEnd:
        return self.items.get(timeout=TIMEOUT_S)


def test_what_one_worker_wrote_in_a_row_comes_together() -> None:
    heard = Heard()
    heard.host.say(
        Output(3, 1, "a\n"), Output(3, 1, "b\n"), Output(3, 2, "oops\n"), Output(3, 1, "c\n"),
        Exited(3, 0, 0, 1.0),
        Output(4, 1, "d\n"), Done(0),
    )  # fmt: skip
    assert [heard.next() for _ in range(6)] == [
        Output(3, 1, "a\nb\n"),
        Output(3, 2, "oops\n"),
        Output(3, 1, "c\n"),
        Exited(3, 0, 0, 1.0, {}),
        Output(4, 1, "d\n"),
        Done(0),
    ]
    heard.link.close()


def test_an_unfinished_line_is_not_joined_with_what_comes_after_it() -> None:
    heard = Heard()
    heard.host.say(Output(0, 1, "no newline"), Output(0, 1, "next\n"))
    assert [heard.next(), heard.next()] == [Output(0, 1, "no newline"), Output(0, 1, "next\n")]
    heard.link.close()


def test_a_host_whose_output_is_not_taken_holds_up_no_other() -> None:
    full, other = Heard("w0"), Heard("w1")
    full.host.say(*(Output(rank, 1, "x\n") for rank in range(MAX_OUTPUTS_IN_FLIGHT + 1)))
    for rank in range(MAX_OUTPUTS_IN_FLIGHT):
        assert full.next() == Output(rank, 1, "x\n")
    other.host.say(Pong(1, 2.0))
    assert other.next() == Pong(1, 2.0)
    with pytest.raises(queue.Empty):
        full.items.get(timeout=0.05)
    full.link.grant()
    assert full.next() == Output(MAX_OUTPUTS_IN_FLIGHT, 1, "x\n")
    for one in (full, other):
        one.link.close()
        assert isinstance(one.next(), LinkEnd)


def test_files_of_the_launcher_that_cannot_be_read_end_the_link_with_their_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreadable(*files: bool) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", "/lib/node/agent.py")

    monkeypatch.setattr("dslaunch.launcher.backends.bootstrap._agent_source", unreadable)
    end = Heard().next()
    assert isinstance(end, LinkEnd)
    assert "cannot read its own files" in end.message
    assert "/lib/node/agent.py" in end.message
    assert "install dslaunch again" in end.message

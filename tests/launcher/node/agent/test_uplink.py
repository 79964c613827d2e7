"""The agent's end of the stream: what is not taken waits, slows the workers,
and is dropped when no reader listens.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator

import pytest

from dslaunch.launcher.node.agent.uplink import (
    FIRST_HEARTBEAT_S,
    OUTBOX_HIGH_BYTES,
    OUTBOX_LOW_BYTES,
    READ_BYTES,
    Uplink,
)
from dslaunch.launcher.node.system.lean_stdlib import Selector
from dslaunch.launcher.wire.frames import MAGIC, Decoder, Frame, Hold, Output, Ping, Pong, encode

PIPE_BYTES = 1 << 16
F_SETPIPE_SZ = 1031


class Launcher:
    """The other end, in the same thread: it reads and writes only when a test says so."""

    def __init__(self) -> None:
        self.selector = Selector()
        read_in, self.to_agent = os.pipe()
        self.from_agent, write_out = os.pipe()
        fcntl.fcntl(write_out, F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self.from_agent, False)
        self.obeyed: list[Frame] = []
        self.pauses: list[bool] = []
        self.num_ends = 0
        self.received = b""
        self.fds = {read_in, self.to_agent, self.from_agent, write_out}
        self.uplink = Uplink(
            self.selector, obey=self.obeyed.append, pause=self.pauses.append, end=self._end,
            fds=(read_in, write_out)
        )  # fmt: skip

    def _end(self) -> None:
        self.num_ends += 1

    def close(self, fd: int) -> None:
        self.fds.remove(fd)
        os.close(fd)

    def say(self, data: bytes) -> None:
        os.write(self.to_agent, data)
        self.act()

    def act(self) -> None:
        """Whatever the agent can do now without waiting, once."""
        self.selector.wait(0)

    def read(self) -> None:
        """All that is in the pipe now; then the agent may go on."""
        self.received += os.read(self.from_agent, PIPE_BYTES)
        self.act()

    @property
    def frames(self) -> list[Frame]:
        head, magic, rest = self.received.partition(MAGIC)
        assert (head, magic) == (b"", MAGIC)
        return Decoder().feed(rest)

    @property
    def is_paused(self) -> bool:
        return self.pauses[-1]


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    one = Launcher()
    yield one
    one.selector.close()
    for fd in one.fds:
        os.close(fd)


def test_the_mark_goes_out_before_the_first_frame(launcher: Launcher) -> None:
    launcher.uplink.send(Pong(1, 2.0))
    assert not launcher.uplink.has_unsent
    launcher.read()
    assert launcher.received == MAGIC + encode(Pong(1, 2.0))


def test_what_the_pipe_does_not_take_waits_and_arrives_whole_and_in_order(launcher: Launcher) -> None:
    sent = [Output(rank, 1, chr(97 + rank) * 50_000) for rank in range(6)]
    for one in sent:
        launcher.uplink.send(one)
    assert launcher.uplink.has_unsent
    while launcher.uplink.has_unsent:
        launcher.read()
    launcher.read()
    assert launcher.frames == sent


def test_the_pipe_is_watched_only_while_something_waits_for_it(launcher: Launcher) -> None:
    assert len([*launcher.selector]) == 1
    launcher.uplink.send(Output(0, 1, "x" * 2 * PIPE_BYTES))
    assert len([*launcher.selector]) == 2
    while launcher.uplink.has_unsent:
        launcher.read()
    assert len([*launcher.selector]) == 1


def test_workers_are_paused_above_the_high_mark_and_go_on_below_the_low_one(launcher: Launcher) -> None:
    size = 1 << 15
    num_sent = 0
    while not any(launcher.pauses):
        launcher.uplink.send(Output(0, 1, "x" * size))
        num_sent += size
    assert OUTBOX_HIGH_BYTES < num_sent <= OUTBOX_HIGH_BYTES + PIPE_BYTES + 2 * size
    num_read = 0
    while launcher.is_paused:
        before = len(launcher.received)
        launcher.read()
        num_read += len(launcher.received) - before
    assert OUTBOX_HIGH_BYTES - OUTBOX_LOW_BYTES < num_read <= num_sent - OUTBOX_LOW_BYTES + 2 * PIPE_BYTES
    assert launcher.uplink.has_unsent


def test_between_the_marks_nothing_changes(launcher: Launcher) -> None:
    launcher.uplink.send(Output(0, 1, "x" * (OUTBOX_LOW_BYTES + PIPE_BYTES + 1000)))
    assert launcher.pauses == []
    launcher.uplink.send(Output(0, 1, "x" * OUTBOX_HIGH_BYTES))
    assert launcher.pauses == [True]


def test_a_frame_that_comes_in_pieces_is_obeyed_once_it_is_whole(launcher: Launcher) -> None:
    data = encode(Ping(7)) + encode(Hold(1.5))
    launcher.say(data[:9])
    assert launcher.obeyed == []
    launcher.say(data[9:-1])
    assert launcher.obeyed == [Ping(7)]
    launcher.say(data[-1:])
    assert launcher.obeyed == [Ping(7), Hold(1.5)]


@pytest.mark.parametrize("last_words", [b"", b"\xff\xff\xff\xff no frame", encode(Ping(1)) + b"\0\0\0\1x"])
def test_the_end_of_the_input_and_nonsense_are_a_hang_up(launcher: Launcher, last_words: bytes) -> None:
    launcher.uplink.send(Output(0, 1, "x" * 4 * OUTBOX_HIGH_BYTES))
    assert launcher.is_paused
    if last_words:
        launcher.say(last_words)
    else:
        launcher.close(launcher.to_agent)
        launcher.act()
    assert launcher.num_ends == 1
    assert not launcher.uplink.has_unsent
    assert not launcher.is_paused, "the workers' pipes have to be emptied, or they never end"
    assert len([*launcher.selector]) == 0
    launcher.uplink.send(Pong(1, 2.0))
    assert not launcher.uplink.has_unsent


def test_a_hang_up_noticed_together_with_room_to_write_is_the_end_of_writing(launcher: Launcher) -> None:
    launcher.uplink.send(Output(0, 1, "x" * 4 * PIPE_BYTES))
    launcher.close(launcher.to_agent)
    os.read(launcher.from_agent, PIPE_BYTES)
    launcher.act()
    assert launcher.num_ends == 1
    assert len([*launcher.selector]) == 0
    with pytest.raises(BlockingIOError):
        os.read(launcher.from_agent, PIPE_BYTES)


def test_a_launcher_that_does_not_read_any_more_has_hung_up(launcher: Launcher) -> None:
    launcher.close(launcher.from_agent)
    launcher.uplink.send(Pong(1, 2.0))
    assert launcher.num_ends == 1
    assert not launcher.uplink.has_unsent
    assert len([*launcher.selector]) == 0


@pytest.mark.parametrize(
    ("heartbeat_s", "hold_s", "allowed_s"),
    [(None, 0.0, FIRST_HEARTBEAT_S), (5.0, 0.0, 5.0), (5.0, 60.0, 60.0), (5.0, 1.0, 5.0)],
)
def test_a_silence_longer_than_the_heartbeat_or_the_one_announced_is_a_hang_up(
    launcher: Launcher,
    heartbeat_s: float | None,
    hold_s: float,
    allowed_s: float,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if heartbeat_s is not None:
        launcher.uplink.heartbeat_s = heartbeat_s
    launcher.uplink.hold_s = hold_s
    before = time.monotonic()
    launcher.say(encode(Ping(1)))
    after = time.monotonic()
    launcher.uplink.check_silence(before + allowed_s)
    assert (launcher.num_ends, capfd.readouterr().err) == (0, "")
    for _ in range(2):
        launcher.uplink.check_silence(after + allowed_s + 0.001)
    said = f"it heard nothing of the launcher for {allowed_s:.0f} s, as if no packet came through\n"
    assert (launcher.num_ends, capfd.readouterr().err) == (2, said)


def test_a_long_frame_is_read_piece_by_piece(launcher: Launcher) -> None:
    """So the workers and the clock have their turn in between."""
    data = encode(Output(0, 1, "x" * READ_BYTES))
    fcntl.fcntl(launcher.to_agent, F_SETPIPE_SZ, 4 * READ_BYTES)
    launcher.say(data)
    assert launcher.obeyed == []
    launcher.act()
    assert launcher.obeyed == [Output(0, 1, "x" * READ_BYTES)]

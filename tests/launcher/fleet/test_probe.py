from __future__ import annotations

import socket
import threading

import psutil
import pytest

from dslaunch.launcher.backends.channel import Channel
from dslaunch.launcher.backends.local import LocalChannel
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.fleet.probe import probe
from dslaunch.launcher.wire.frames import MAGIC, Hello, encode
from tests.launcher.memory_host import plan_of, way_to


class FakeChannel:
    """A host that says its pieces, then ends its stream or waits until it is closed."""

    local_address = ""

    def __init__(self, *pieces: bytes, ends: bool = False, error: str = "") -> None:
        self.is_closed = threading.Event()
        self._pieces = list(pieces)
        self._ends = ends
        self._error = error

    def read(self) -> bytes:
        if self._pieces:
            return self._pieces.pop(0)
        if not self._ends:
            self.is_closed.wait()
        return b""

    def write(self, data: bytes) -> None:
        pass

    def error_text(self) -> str:
        return self._error

    def exit_status(self) -> int | None:
        return None

    def close(self) -> None:
        self.is_closed.set()


def hello(name: str) -> Hello:
    return Hello(hostname=name, python="3.11.2", reached_at="", num_devices=4, pid=7)


def probed(*hosts: Channel | Exception, **given: float) -> dict[int, Hello | str]:
    """What a look at these hosts finds."""
    return probe(plan_of(len(hosts)).nodes, way_to(hosts), **given)


def test_every_host_is_answered_for_in_the_given_order() -> None:
    found = probed(
        FakeChannel(b"Welcome!\n", MAGIC + encode(hello("n0"))),
        LaunchError("n1 port 22 refused the connection"),
        FakeChannel(ends=True, error="sh: no python\n"),
        OSError(113, "No route to host"),
        FakeChannel(MAGIC + b"\xff\xff\xff\xff"),
    )
    assert list(found.items()) == [
        (0, hello("n0")),
        (1, "n1 port 22 refused the connection"),
        (
            2,
            "no agent started there: the connection ended, and its last words are 'sh: no python'; "
            "a command must run there and print nothing of its own: test with ssh HOST true; "
            "python= in the hostfile, if it is given, must name a Python",
        ),
        (3, "the connection broke: No route to host"),
        (4, "not a frame: b'\\xff\\xff\\xff\\xff' would have 4294967295 bytes; at most 67108864 are allowed"),
    ]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            "no agent runs with /usr/bin/python3, which is Python 3.6.8: it needs 3.8 or newer",
            "no agent runs with /usr/bin/python3, which is Python 3.6.8: it needs 3.8 or newer; ",
        ),
        (
            "Unknown option: -I\nusage: python [option]\nTry `python -h' for more information.\n",
            "no agent runs with a Python before 3.4, which the host has (Unknown option: -I); ",
        ),
    ],
)
def test_a_python_that_is_too_old_is_named_as_the_reason(error: str, why: str) -> None:
    hint = "install Python 3.8 or newer there, or name it with python= in the hostfile"
    assert probed(FakeChannel(ends=True, error=error)) == {0: why + hint}


def test_a_host_that_says_nothing_at_all_is_not_quoted() -> None:
    said = str(probed(FakeChannel(ends=True))[0])
    assert said.startswith("no agent started there: the connection ended and said nothing; a command must"), (
        said
    )


def test_a_host_that_prints_without_end_is_told_what_to_do() -> None:
    said = str(probed(FakeChannel(b"quota exceeded\n" * 100_000))[0])
    assert said.startswith("not an agent: it printed b'quota exceeded"), said
    assert "let login scripts print nothing there" in said


@pytest.mark.slow
def test_a_host_that_stays_silent_is_given_up_and_closed() -> None:
    silent = FakeChannel(b"Enter your name: ")
    answers = probed(silent, FakeChannel(MAGIC + encode(hello("n1"))), timeout_s=1.0)
    assert answers == {
        0: (
            "connected, but no agent answered within 1 s; does a login script wait, or read what is meant "
            "for the agent? Are large packets lost (MTU)?"
        ),
        1: hello("n1"),
    }
    assert silent.is_closed.is_set()


def test_a_host_that_answered_is_left_at_once() -> None:
    """The connections of the first hosts must be free for the next ones:
    there are fewer at a time than hosts.
    """
    channels = [FakeChannel(MAGIC + encode(hello(f"n{rank}"))) for rank in range(200)]
    assert probed(*channels) == {rank: hello(f"n{rank}") for rank in range(200)}
    assert all(one.is_closed.is_set() for one in channels)


def test_no_host_no_answer() -> None:
    assert probed() == {}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a pipe's end that gc closes
def test_a_real_agent_says_hello_and_nothing_of_it_is_left() -> None:
    (answer,) = probe(plan_of(1).nodes, lambda node: LocalChannel(end_within_s=10)).values()
    assert isinstance(answer, Hello)
    assert answer.hostname == socket.gethostname()
    assert not psutil.pid_exists(answer.pid)

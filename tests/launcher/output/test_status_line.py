from __future__ import annotations

import io
import os
import pty
import re
import struct
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl

import pytest

from dslaunch.launcher.inputs.line_prefix import Origin
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.output.status_line import ERASE, describe_hosts, shown


@pytest.mark.parametrize(
    ("phase", "num_hosts", "missing", "num_failed", "text"),
    [
        ("connected", 8, [], 0, "8 of 8 hosts connected"),
        ("connected", 8, ["w1"], 0, "7 of 8 hosts connected, waiting for w1"),
        ("prepared", 8, ["w1", "w2"], 1, "5 of 8 hosts prepared, 1 failed, waiting for w1, w2"),
        ("prepared", 8, [f"w{n}" for n in range(6)], 0, "2 of 8 hosts prepared, waiting for w[0-5]"),
        ("connected", 64, [f"node{n}" for n in range(33, 65)], 0,
         "32 of 64 hosts connected, waiting for node[33-64]"),
        ("connected", 40, [f"{chr(97 + n)}-long-name" for n in range(26)], 0,
         "14 of 40 hosts connected, waiting for a-long-name, b-long-name, c-long-name, "
         "d-long-name and 22 more"),
        ("connected", 2, [], 2, "0 of 2 hosts connected, 2 failed"),
    ],
)  # fmt: skip
def test_how_far_the_start_is(
    phase: str, num_hosts: int, missing: list[str], num_failed: int, text: str
) -> None:
    assert describe_hosts(phase, num_hosts, missing, num_failed) == text


@pytest.mark.parametrize(
    ("text", "num_columns", "line"),
    [("abc", 80, b"abc"), ("abcdef", 4, b"abc"), ("abc", 0, b"a"), ("caf\u00e9", 80, b"caf?")],
)
def test_the_line_is_never_wider_than_the_terminal(text: str, num_columns: int, line: bytes) -> None:
    assert shown(text, num_columns) == ERASE + line


END = b"\0"


class Terminal:
    """A pseudo-terminal, and what a person would see on it."""

    def __init__(self, num_columns: int = 60) -> None:
        self._master, self._slave = pty.openpty()
        ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, num_columns, 0, 0))
        self.stream = open(self._slave, "wb", buffering=0)  # noqa: SIM115 - closed by close()

    def read(self) -> bytes:
        """All that was written; the kernel brings it across in its own time, so a mark is sent after it."""
        os.write(self._slave, END)
        data = b""
        while not data.endswith(END):
            data += os.read(self._master, 1 << 16)
        return data.removesuffix(END)

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


def seen(data: bytes) -> list[str]:
    """The lines on the screen; the last one is the cursor's."""
    lines = [line.rpartition(ERASE.decode())[2].rstrip("\r") for line in data.decode().split("\n")]
    return [re.sub(r"\x1b\[\d*m", "", line) for line in lines]


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    one = Terminal()
    yield one
    one.close()


@pytest.fixture
def console(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Console:
    """A console on the terminal, 1 s after the start began."""
    monkeypatch.setenv("NO_COLOR", "1")
    one = Console(log_level="info", out=terminal.stream, err=terminal.stream)
    one.begin((Origin("w0", 0, 0, 0),))
    return one


def later(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: now)


def test_one_line_changes_in_place_and_vanishes(
    terminal: Terminal, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for now, missing in ((100.0, ["w1", "w2"]), (101.0, ["w1", "w2"]), (101.05, ["w2"]), (102.0, ["w2"])):
        later(monkeypatch, now)
        console.progress("connected", 4, missing, 100.0)
        assert console.drain()
        said.append(terminal.read())
    console.progress_of_workers(3, 4, 100.0)  # too soon after the last one
    later(monkeypatch, 103.0)
    console.progress_of_workers(3, 4, 100.0)
    assert console.drain()
    said.append(terminal.read())
    assert said == [
        b"",
        ERASE + b"dslaunch: 2 of 4 hosts connected, waiting for w1, w2 (1 s)",
        b"",
        ERASE + b"dslaunch: 3 of 4 hosts connected, waiting for w2 (2 s)",
        ERASE + b"dslaunch: 3 of 4 workers up (3 s)",
    ]
    console.end_progress()
    console.end_progress()
    assert console.drain()
    assert terminal.read() == ERASE


def test_output_and_words_erase_the_line_first(
    terminal: Terminal, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, write in enumerate((lambda: console.output(0, 1, "out\n"), lambda: console.say("word"))):
        later(monkeypatch, 101.0 + place)
        console.progress("connected", 2, ["w1"], 100.0)
        assert console.drain()
        write()
        assert console.drain()
    later(monkeypatch, 110.0)
    console.progress("connected", 2, ["w1"], 100.0)
    assert console.drain()
    assert seen(terminal.read()) == [
        "w0:0 | out",
        "dslaunch: word",
        "dslaunch: 1 of 2 hosts connected, waiting for w1 (10 s)",
    ]


def test_a_narrow_terminal_gets_one_line_all_the_same(
    terminal: Terminal, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch, 101.0)
    console.progress("connected", 4, ["a-long-host-name-1", "a-long-host-name-2"], 100.0)
    assert console.drain()
    (line,) = seen(terminal.read())
    assert line == "dslaunch: 2 of 4 hosts connected, waiting for a-long-host-n"[:59]


def test_quiet_means_no_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(log_level="error", out=io.BytesIO(), err=terminal.stream)
    later(monkeypatch, 101.0)
    console.progress("connected", 2, ["w1"], 100.0)
    console.end_progress()
    assert console.drain()
    assert terminal.read() == b""


def test_a_stdout_that_is_a_file_has_no_codes_in_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    console = Console(log_level="info", out=out, err=terminal.stream)
    console.begin((Origin("w0", 0, 0, 0),))
    later(monkeypatch, 101.0)
    console.progress("connected", 2, ["w1"], 100.0)
    console.output(0, 1, "out\n")
    assert console.drain()
    assert out.getvalue() == b"w0:0 | out\n"

from __future__ import annotations

from collections.abc import Callable

import pytest

from dslaunch.launcher.fleet import host_output
from dslaunch.launcher.fleet.host_output import HostOutput
from dslaunch.launcher.wire.frames import text_of

NAMES = ["node1", "node2", "node3", "gpu"]


class Screen:
    """What was put, by stream, and how often a host was told to go on."""

    def __init__(self) -> None:
        self.data = {1: b"", 2: b""}
        self.num_done = 0

    def put(self, stream: int, data: bytes, on_done: Callable[[], None] | None = None) -> None:
        self.data[stream] += data
        if on_done is not None:
            on_done()

    def done(self) -> None:
        self.num_done += 1


@pytest.mark.parametrize(
    ("lines", "out", "err"),
    [
        ([], b"", b""),
        ([("node1", 1, b"a\n"), ("node2", 1, b"a\n"), ("node3", 1, b"a\n"), ("gpu", 1, b"a\n")],
         b"node[1-3], gpu: a\n", b""),
        ([("node2", 1, b"a\n"), ("node1", 1, b"b\n"), ("node3", 1, b"a\n")],
         b"node1: b\nnode[2-3]: a\n", b""),
        ([("node1", 1, b"a\n"), ("node2", 1, b"a\nb\n"), ("node1", 1, b"b\n")],
         b"node[1-2]: a\nnode[1-2]: b\n", b""),
        ([("node1", 1, b"a\n"), ("node2", 1, b"a\n"), ("node2", 2, b"e\n")],
         b"node1: a\nnode2: a\n", b"node2: e\n"),
        ([("node1", 1, b"\n\xff\r\n")], b"node1: \nnode1: \xff\r\n", b""),
    ],
)  # fmt: skip
def test_equal_output_is_shown_once_with_all_its_hosts(
    lines: list[tuple[str, int, bytes]], out: bytes, err: bytes
) -> None:
    screen = Screen()
    output = HostOutput(NAMES, screen.put, is_folding=True)
    for name, stream, data in lines:
        output.add(name, stream, text_of(data), screen.done)
    assert screen.data == {1: b"", 2: b""}, "not before all is there"
    assert screen.num_done == len(lines), "and no host waits for that"
    output.finish()
    assert screen.data == {1: out, 2: err}


def test_without_folding_every_line_is_shown_as_it_comes() -> None:
    screen = Screen()
    output = HostOutput(NAMES, screen.put, is_folding=False)
    output.add("node1", 1, "a\nb\n", screen.done)
    assert screen.data[1] == b"node1: a\nnode1: b\n"
    assert screen.num_done == 1
    output.finish()
    assert screen.data[1] == b"node1: a\nnode1: b\n"


def test_more_than_memory_should_hold_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_output, "MAX_HELD_BYTES", 5)
    screen = Screen()
    output = HostOutput(NAMES, screen.put, is_folding=True)
    output.add("node1", 1, "aa\n", screen.done)
    assert screen.data[1] == b""
    output.add("node2", 1, "aa\n", screen.done)
    assert screen.data[1] == b"node[1-2]: aa\n"
    output.add("node1", 1, "b\n", screen.done)
    assert screen.data[1] == b"node[1-2]: aa\nnode1: b\n"
    assert output.was_too_much

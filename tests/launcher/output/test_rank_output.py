from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from dslaunch.launcher.inputs.line_prefix import Origin
from dslaunch.launcher.options.logs import LogOptions
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.output.display import timestamp

ORIGINS = (Origin("w0", 0, 0, 0), Origin("w0", 0, 1, 1), Origin("w1", 1, 2, 0))


class Screen:
    """A console with these options, and what it wrote."""

    def __init__(self, logs: LogOptions, *, has_color: bool = False) -> None:
        self.out, self.err = (Terminal(), Terminal()) if has_color else (io.BytesIO(), io.BytesIO())
        self.console = Console(log_level="info", logs=logs, out=self.out, err=self.err)
        self.console.begin(ORIGINS)
        self.num_done = 0

    def put(self, rank: int, stream: int, text: str) -> None:
        self.console.output(rank, stream, text, self._done)

    def _done(self) -> None:
        self.num_done += 1

    def finish(self) -> tuple[bytes, bytes]:
        self.console.finish(is_patient=True)
        return self.out.getvalue(), self.err.getvalue()


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("options", "out", "err"),
    [
        (LogOptions(), b"w0:0 | a\nw0:0 | b\nw1:2 | c\n", b"w0:1 | d\n"),
        (LogOptions(prefix=""), b"a\nb\nc\n", b"d\n"),
        (
            LogOptions(prefix="[{node_rank}.{local_rank} {stream}]"),
            b"[0.0 stdout] a\n[0.0 stdout] b\n[1.0 stdout] c\n",
            b"[0.1 stderr] d\n",
        ),
        (LogOptions(ranks=(range(2, 3),)), b"w1:2 | c\n", b""),
        (LogOptions(ranks=()), b"", b""),
        (LogOptions(is_folding=True), b"w0:0 | a\nw0:0 | b\nw1:2 | c\n", b"w0:1 | d\n"),
    ],
)
def test_what_is_shown(options: LogOptions, out: bytes, err: bytes) -> None:
    screen = Screen(options)
    screen.put(0, 1, "a\nb\n")
    screen.put(2, 1, "c\n")
    screen.put(1, 2, "d\n")
    assert screen.finish() == (out, err)
    assert screen.num_done == 3


@pytest.mark.parametrize(
    "options", [{}, {"ranks": ()}, {"ranks": (range(1),)}, {"is_folding": True}, {"each_rank_dir": "other"}]
)
def test_more_may_come_once_a_text_is_both_shown_and_kept(
    options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly one call for each text, wherever it goes."""
    monkeypatch.chdir(tmp_path)
    screen = Screen(LogOptions(log_dir="logs", **options))  # type: ignore[arg-type]
    for number in range(10):
        screen.put(number % 3, 1 + number % 2, f"{number}\n")
    screen.finish()
    assert screen.num_done == 10


def test_folded_lines_and_single_ones_with_times() -> None:
    screen = Screen(LogOptions(is_folding=True, has_timestamps=True))
    for rank in (0, 2, 1):
        screen.put(rank, 1, "a\n")
    screen.put(1, 1, "b\n")
    out, _ = screen.finish()
    lines = out.decode().splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["w0:0-1, w1:2 | a", "w0:1 | b"]
    assert all(len(line.partition(" ")[0]) == len("2026-08-01T14:15:03.250") for line in lines)


def test_a_folded_line_without_prefix() -> None:
    screen = Screen(LogOptions(is_folding=True, prefix=""))
    for rank in range(3):
        screen.put(rank, 1, "a\n")
    assert screen.finish()[0] == b"a\n"


def test_folded_lines_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen(LogOptions(is_folding=True), has_color=True)
    screen.put(0, 1, "a\n")
    screen.put(1, 1, "a\nb\n")
    out, _ = screen.finish()
    assert out == b"\x1b[1mw0:0-1 |\x1b[0m a\n\x1b[33mw0:1 |\x1b[0m b\n"


def test_words_of_the_launcher_come_behind_what_was_written_before_them() -> None:
    screen = Screen(LogOptions(is_folding=True))
    screen.put(0, 2, "a\n")
    screen.console.error("it failed")
    screen.put(0, 2, "b\n")
    assert screen.finish()[1] == b"w0:0 | a\ndslaunch: it failed\nw0:0 | b\n"


def test_the_next_attempt_may_have_other_workers() -> None:
    screen = Screen(LogOptions(is_folding=True))
    screen.put(2, 1, "a\n")
    screen.console.begin((Origin("w7", 0, 0, 0),))
    screen.put(0, 1, "a\n")
    assert screen.finish()[0] == b"w1:2 | a\nw7:0 | a\n"


def test_the_time_is_local_and_to_the_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        assert timestamp(0.0) == b"1970-01-01T05:30:00.000 "
        assert timestamp(1.0019) == b"1970-01-01T05:30:01.001 "
        assert timestamp(1753977600.25) == b"2025-07-31T21:30:00.250 "
    finally:
        monkeypatch.undo()
        time.tzset()

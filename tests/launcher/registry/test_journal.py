"""The journal of a job: what was shown comes back, from a file that is bounded and may be cut anywhere."""

from __future__ import annotations

import errno
import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.inputs.line_prefix import Origin
from dslaunch.launcher.options.logs import LogOptions
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.output.display import (
    AllStarted,
    Answered,
    Begun,
    Below,
    Lines,
    Raw,
    Said,
    Status,
    StreamDisplay,
)
from dslaunch.launcher.output.writer import Writer
from dslaunch.launcher.registry import replay as replaying
from dslaunch.launcher.registry.following import last_entries
from dslaunch.launcher.registry.journal import (
    FILE,
    KINDS,
    OLD_FILE,
    JournalDisplay,
    JournalFile,
    line,
    shown_of,
)
from dslaunch.launcher.registry.journal_reader import JournalReader, last_line
from dslaunch.launcher.registry.replay import Choice, Replay

ORIGINS = (Origin("w0", 0, 0, 0), Origin("w0", 0, 1, 1), Origin("w1", 1, 2, 0))


class Kept:
    """A console whose display is a journal."""

    def __init__(self, folder: Path, logs: LogOptions | None = None, **given: Any) -> None:
        self.problems: list[str] = []
        logs = logs or LogOptions()
        self.file = JournalFile(folder, logs, on_problem=self.problems.append, **given)
        self.console = Console(
            log_level="info", logs=logs, display=lambda writer: JournalDisplay(writer, self.file)
        )
        self.console.begin(ORIGINS)

    def put(self, rank: int, text: str, stream: int = 1) -> None:
        self.console.output(rank, stream, text)

    def drain(self) -> None:
        assert self.console.drain(10)


def texts(folder: Path) -> list[str]:
    return [one[4] for one in JournalReader(folder).entries() if one[0] == "o"]


def replayed(folder: Path, choice: Choice, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    out, err = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(
        replaying, "StreamDisplay", lambda writer, logs: StreamDisplay(writer, logs, out=out, err=err)
    )
    replay = Replay(choice)
    replay.show(JournalReader(folder).entries())
    assert replay.writer.drain(10)
    return out.getvalue(), err.getvalue()


def test_what_a_display_shows_is_read_as_it_was_written(tmp_path: Path) -> None:
    shown = [
        Begun(1, ORIGINS),
        Status("2 of 3 workers up"),
        AllStarted(),
        Lines(1.25, (0, 2), 2, b"\xff\x00 \xc3\xa4\n"),
        Said(2.5, 30, "warning: \udcff"),
        Below(3.0, "    more"),
        Raw(1, b"\xfe"),
        Answered(),
    ]
    assert {*map(type, shown)} == {*KINDS.values()}
    writer = Writer()
    display = JournalDisplay(writer, JournalFile(tmp_path, LogOptions(), on_problem=print))
    for one in shown:
        display.put(one)
    assert writer.drain(10)
    assert [shown_of(one) for one in JournalReader(tmp_path).entries()] == [None, *shown]


@pytest.mark.parametrize(
    "logs",
    [
        LogOptions(),
        LogOptions(prefix=""),
        LogOptions(prefix="<{rank} {stream}>"),
        LogOptions(is_folding=True),
        LogOptions(ranks=(range(1, 2),)),
    ],
)
def test_a_replay_is_what_a_console_shows(
    logs: LogOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path, logs)
    out, err = io.BytesIO(), io.BytesIO()
    live = Console(log_level="info", logs=logs, out=out, err=err)
    live.begin(ORIGINS)
    for console in (kept.console, live):
        console.say("it begins")
        for rank in range(3):
            console.output(rank, 1, "same\n")
            console.output(rank, 2, f"own {rank}\nsecond \udcff\u00e9\n")
        console.warn("look")
        console.show("title", ["a\tb", "c"])
        console.put(1, b"raw \xfe\n")
        assert console.drain(10)
    assert replayed(tmp_path, Choice(), monkeypatch) == (out.getvalue(), err.getvalue())


def test_the_journal_says_when_all_workers_run_and_what_was_asked_for_is_shown(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.console.end_progress(is_up=True)
    kept.console.answered()
    kept.drain()
    assert [one[0] for one in JournalReader(tmp_path).entries()] == ["h", "b", "s", "a"]


def test_the_line_that_changes_in_place_is_kept_for_a_person_who_looks_at_the_start(tmp_path: Path) -> None:
    texts = []
    for is_live in (True, False):
        folder = tmp_path / str(is_live)
        folder.mkdir()
        file = JournalFile(folder, LogOptions(), on_problem=print)
        console = Console(
            log_level="info",
            display=lambda writer, file=file, is_live=is_live: JournalDisplay(
                writer, file, has_status_line=is_live
            ),
        )
        console.progress("connected", 3, ["a"], time.monotonic() - 60)
        console.end_progress(is_up=True)
        assert console.drain(10)
        texts.append([one for one in JournalReader(folder).entries() if one[0] in ("p", "w", "s")])
    live, plain = texts
    assert live == [["p", "2 of 3 hosts connected, waiting for a (60 s)"], ["p", ""], ["s"]]
    assert [one[0] for one in plain] == ["w", "s"]
    assert plain[0][3] == live[0][1]


def test_a_replay_of_some_ranks_is_what_these_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path)
    kept.console.say("not this")
    for rank in range(3):
        kept.put(rank, f"of {rank}\n")
    kept.drain()
    out, err = replayed(tmp_path, Choice(ranks=(range(1, 3),)), monkeypatch)
    assert (out, err) == (b"w0:1 | of 1\nw1:2 | of 2\n", b"")


@pytest.mark.slow
def test_two_files_are_kept_and_what_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path, segment_bytes=2000)
    num_lines = 500
    for number in range(num_lines):
        kept.put(number % 3, f"line {number}\n")
        kept.drain()
    assert sorted(os.listdir(tmp_path)) == [FILE, OLD_FILE]
    assert all((tmp_path / name).stat().st_size <= 2000 for name in (FILE, OLD_FILE))
    found = texts(tmp_path)
    first = int(found[0].split()[1])
    assert found == [f"line {number}\n" for number in range(first, num_lines)]
    assert 0 < first < num_lines - 20
    out, err = replayed(tmp_path, Choice(), monkeypatch)
    assert err == f"dslaunch: the first {first} lines are not kept any more; --log_dir keeps all\n".encode()
    assert out.count(b"\n") == num_lines - first
    assert out.startswith(b"w")  # the workers are known in each file


@pytest.mark.slow
def test_a_reader_that_follows_misses_nothing_across_files(tmp_path: Path) -> None:
    kept = Kept(tmp_path, segment_bytes=2000)
    reader = JournalReader(tmp_path)
    found = []
    for number in range(300):
        kept.put(0, f"{number}\n")
        kept.drain()
        if number % 7 == 0:
            found += [one[4] for one in reader.entries() if one[0] == "o"]
    found += [one[4] for one in reader.entries() if one[0] == "o"]
    assert found == [f"{number}\n" for number in range(300)]


def test_a_reader_misses_nothing_that_comes_while_the_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path, segment_bytes=2000)
    kept.put(0, "first\n")
    kept.drain()
    look = JournalReader._is_replaced

    def meanwhile(reader: JournalReader) -> bool:
        monkeypatch.setattr(JournalReader, "_is_replaced", look)
        for text in ("second\n", "x" * 2000 + "\n"):
            kept.put(0, text)
            kept.drain()
        return look(reader)

    monkeypatch.setattr(JournalReader, "_is_replaced", meanwhile)
    assert texts(tmp_path) == ["first\n", "second\n", "x" * 2000 + "\n"]


@pytest.mark.slow
def test_a_reader_that_is_too_slow_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(
        replaying, "StreamDisplay", lambda writer, logs: StreamDisplay(writer, logs, out=out, err=err)
    )
    kept, replay, reader = Kept(tmp_path, segment_bytes=2000), Replay(Choice()), JournalReader(tmp_path)
    for number in range(300):
        kept.put(0, f"{number}\n")
        kept.drain()
        if number == 5:
            replay.show(reader.entries())
    replay.show(reader.entries())
    replay.writer.drain()
    assert b"lines are missing here: they came faster than they were read" in err.getvalue()
    assert out.getvalue().endswith(b"w0:0 | 299\n")


@given(cut=st.integers(0, 400))
def test_a_journal_that_a_crash_has_cut_anywhere_is_read_up_to_there(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    whole = b"".join(
        [line("h", 0, 0, None, False), line("b", 0, ORIGINS)]
        + [line("o", 1.5, [number], 1, f"text {number}\n") for number in range(3)]
    )
    (folder / FILE).write_bytes(whole[:cut])
    found = texts(folder)
    assert found == ["text 0\n", "text 1\n", "text 2\n"][: len(found)]
    assert len(found) == max(0, whole[:cut].count(b"\n") - 2)


def test_what_is_no_line_of_a_journal_is_passed_over(tmp_path: Path) -> None:
    data = [line("h", 0, 0, None, False), b'{"a": 1}\n', b'["o"]\n', b"\xff\n", line("o", 1, [0], 1, "x\n")]
    (tmp_path / FILE).write_bytes(b"".join(data))
    assert texts(tmp_path) == ["x\n"]


def test_a_disk_that_takes_nothing_costs_lines_that_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    kept.put(0, "before\n")
    kept.drain()
    real = os.write
    room = [10]

    def full(fd: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num = real(fd, bytes(data)[: room[0]])
        room[0] -= num
        return num

    monkeypatch.setattr(os, "write", full)
    kept.put(1, "lost\nlost\n")
    kept.drain()
    kept.put(1, "lost\n")
    kept.drain()
    monkeypatch.setattr(os, "write", real)
    assert "No space left on device" in kept.problems[0]
    kept.put(2, "after\n")
    kept.drain()
    assert texts(tmp_path) == ["before\n", "after\n"]
    assert [one for one in JournalReader(tmp_path).entries() if one[0] == "l"] == [
        ["l", 3, "No space left on device"]
    ]
    assert kept.problems[-1] == "3 lines of output were not kept: No space left on device"
    room[0] = 0
    monkeypatch.setattr(os, "write", full)
    kept.put(1, "lost\n")
    kept.drain()
    monkeypatch.setattr(os, "write", real)
    kept.put(2, "after\n")
    kept.drain()
    assert kept.problems[-1] == "4 lines of output were not kept: No space left on device"
    assert kept.console.failure is None


def test_the_last_line_is_that_of_the_newest_words(tmp_path: Path) -> None:
    assert last_line(tmp_path) == ""
    kept = Kept(tmp_path)
    kept.drain()
    assert last_line(tmp_path) == ""
    kept.put(0, "a\nb\n\n")
    kept.drain()
    assert last_line(tmp_path) == "b"
    kept.put(0, "x" * 200_000 + "\n")
    kept.drain()
    assert last_line(tmp_path) == "x" * 200_000
    kept.console.warn("over")
    kept.drain()
    assert last_line(tmp_path) == "warning: over"


@pytest.mark.slow
def test_the_last_lines_of_two_files_say_nothing_of_those_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path, segment_bytes=2000)
    for number in range(300):
        kept.put(0, f"{number}\n")
        kept.drain()
    entries, num_left_out = last_entries(JournalReader(tmp_path).entries(), 3)
    out, err = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(
        replaying, "StreamDisplay", lambda writer, logs: StreamDisplay(writer, logs, out=out, err=err)
    )
    replay = Replay(Choice())
    replay.show(entries)
    replay.writer.drain()
    assert (out.getvalue(), err.getvalue()) == (b"w0:0 | 297\nw0:0 | 298\nw0:0 | 299\n", b"")
    assert num_left_out == len(texts(tmp_path)) - 3


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 4, 5, 99])
def test_the_last_lines_and_how_many_came_before(tmp_path: Path, wanted: int) -> None:
    kept = Kept(tmp_path)
    kept.put(0, "1\n2\n")
    kept.console.say("3")
    kept.put(1, "4\n5\n")
    kept.drain()
    entries, num_left_out = last_entries(JournalReader(tmp_path).entries(), wanted)
    shown = "".join(
        str(one[4]) if one[0] == "o" else f"{one[3]}\n" for one in entries if one[0] in ("o", "w")
    )
    assert shown.split() == ["1", "2", "3", "4", "5"][max(0, 5 - wanted) :]
    assert num_left_out == max(0, 5 - wanted)
    assert [one[0] for one in entries][:2] == ["h", "b"]

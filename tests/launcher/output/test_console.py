from __future__ import annotations

import errno
import io
import itertools
import os
import pty
import re
import threading
import time
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.line_prefix import Origin
from dslaunch.launcher.job.verdict import HostFailure, RankFailure, Verdict
from dslaunch.launcher.options.logs import LogOptions
from dslaunch.launcher.output import console as console_module
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.wire.frames import Metrics, text_of
from dslaunch.launcher.wording import shown_time

ORIGINS = (
    Origin("w0", 0, 0, 0),
    Origin("w0", 0, 1, 1),
    Origin("w0", 0, 3, 3),
    Origin("w1", 1, 12, 0),
)


def console_of(out: IO[bytes], err: IO[bytes], log_level: str = "info") -> Console:
    """A console to which a job of ORIGINS has begun."""
    console = Console(log_level=log_level, out=out, err=err)
    console.begin(ORIGINS)
    return console


class Screen:
    """A console and what it wrote."""

    def __init__(self, log_level: str = "info") -> None:
        self._out, self._err = io.BytesIO(), io.BytesIO()
        self.console = console_of(self._out, self._err, log_level)

    @property
    def out(self) -> bytes:
        assert self.console.drain(10)
        return self._out.getvalue()

    @property
    def err(self) -> bytes:
        assert self.console.drain(10)
        return self._err.getvalue()


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


class Full(io.RawIOBase):
    """A stream that cannot be written to."""

    def __init__(self, number: int) -> None:
        self._number = number

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raise OSError(self._number, os.strerror(self._number))


def rank(number: int, *lines: str, code: int = 1) -> RankFailure:
    return RankFailure(
        rank=number, local_rank=0, host="w0", pid=7, code=code, signal=0, at_s=1.0, last_lines=lines
    )


def host(name: str) -> HostFailure:
    return HostFailure(host=name, message="refused the connection", at_s=1.0)


def test_every_line_stands_behind_its_host_and_rank() -> None:
    screen = Screen()
    screen.console.output(3, 1, "a\nb\n")
    screen.console.output(12, 2, "oops\n")
    screen.console.output(3, 1, "\n")
    screen.console.output(3, 1, "no newline")
    assert screen.out == b"w0:3 | a\nw0:3 | b\nw0:3 | \nw0:3 | no newline\n"
    assert screen.err == b"w1:12 | oops\n"


@pytest.mark.slow
@given(lines=st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), min_size=1))
def test_workers_bytes_are_not_changed(lines: list[bytes]) -> None:
    screen = Screen()
    screen.console.output(0, 1, text_of(b"".join(line + b"\n" for line in lines)))
    assert screen.out == b"".join(b"w0:0 | " + line + b"\n" for line in lines)


@pytest.mark.parametrize(
    ("log_level", "said"),
    [
        ("debug", ["detail", "word", "warning: care", "bad"]),
        ("info", ["word", "warning: care", "bad"]),
        ("warning", ["warning: care", "bad"]),
        ("error", ["bad"]),
        ("critical", []),
    ],
)
def test_the_log_level_says_what_the_launcher_itself_prints(log_level: str, said: list[str]) -> None:
    screen = Screen(log_level)
    screen.console.debug("detail")
    screen.console.say("word")
    screen.console.warn("care")
    screen.console.error("bad")
    screen.console.output(0, 1, "output\n")
    assert screen.err.decode().splitlines() == [f"dslaunch: {one}" for one in said]
    assert screen.out == b"w0:0 | output\n"


def test_a_name_that_is_not_utf_8_is_said_as_it_is() -> None:
    screen = Screen()
    screen.console.say("no script caf\udcc3")
    assert screen.err == b"dslaunch: no script caf\xc3\n"


def test_colors_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, err = Terminal(), io.BytesIO()
    console = console_of(out, err)
    console.output(1, 1, "a\n")
    console.output(1, 2, "b\n")
    console.error("c")
    assert console.drain(10)
    assert out.getvalue() == b"\x1b[33mw0:1 |\x1b[0m a\n"
    assert err.getvalue() == b"w0:1 | b\ndslaunch: c\n"


def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    out, err = Terminal(), Terminal()
    console = console_of(out, err)
    console.output(1, 1, "a\n")
    console.error("c")
    assert console.drain(10)
    assert (out.getvalue(), err.getvalue()) == (b"w0:1 | a\n", b"dslaunch: c\n")


def test_a_real_terminal_is_recognised() -> None:
    master, slave = pty.openpty()
    try:
        with open(slave, "wb", buffering=0) as stream:
            console = console_of(io.BytesIO(), stream)
            console.error("bad")
            assert console.drain(10)
        assert re.fullmatch(rb"(\x1b\[31m)?dslaunch:(\x1b\[0m)? bad\r\n", os.read(master, 100))
    finally:
        os.close(master)


def test_waiting_is_said_after_two_seconds_and_then_every_two(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    missing = [f"w{place}" for place in range(6)]
    for now in (100.0, 101.9, 102.0, 103.0, 103.9, 104.0, 107.0):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        screen.console.progress("connected", 8, missing, 100.0)
        missing = missing[1:]
    assert screen.err.decode().splitlines() == [
        "dslaunch: 4 of 8 hosts connected, waiting for w2, w3, w4, w5 (2 s)",
        "dslaunch: 7 of 8 hosts connected, waiting for w5 (4 s)",
        "dslaunch: 8 of 8 hosts connected (7 s)",
    ]


def test_a_long_wait_in_a_pipe_is_said_at_longer_and_longer_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen()
    for tenth in range(3000):
        monkeypatch.setattr(time, "monotonic", lambda now=100.0 + tenth / 10: now)
        screen.console.progress("ready", 2, ["w1"], 100.0)
    said = [int(line.rpartition(b"(")[2].split()[0]) for line in screen.err.splitlines()]
    assert said[:5] == [2, 4, 6, 8, 10]
    assert len(said) < 25
    assert max(after - before for before, after in itertools.pairwise(said)) < 75


def test_the_names_of_many_that_are_waited_for_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    screen.console.progress("prepared", 9, [f"w{place}" for place in range(6)], 40.0)
    assert screen.err == b"dslaunch: 3 of 9 hosts prepared, waiting for w[0-5] (10 s)\n"


RANK = "rank 0 on w0 (local rank 0, pid 7) exited with code 1"


@pytest.mark.parametrize(
    ("failures", "lines"),
    [
        ((), ["dslaunch: 4 workers ended with code 0 after 0.8 s on 2 hosts"]),
        ((rank(0),), [f"dslaunch: {RANK}; it failed first"]),
        (
            (rank(0, "Traceback", "caf\udcc3"), rank(1)),
            [
                f"dslaunch: {RANK}; it failed first",
                "dslaunch: last lines of rank 0:",
                "    Traceback",
                "    caf\ufffd",
                f"dslaunch: also failed: {RANK.replace('rank 0 on', 'rank 1 on')}",
            ],
        ),
        ((host("w0"),), ["dslaunch: w0: refused the connection"]),
        (
            tuple(host(f"w{place}") for place in range(8)),
            ["dslaunch: w[0-7]: refused the connection (8 hosts)"],
        ),
        (
            (host("w1"), rank(0, "Traceback")),
            [
                "dslaunch: w1: refused the connection; it failed first",
                f"dslaunch: also failed: {RANK}",
            ],
        ),
        (
            tuple(rank(place) for place in range(9)),
            [
                f"dslaunch: {RANK}; it failed first",
                *(
                    f"dslaunch: also failed: {RANK.replace('rank 0 on', f'rank {place} on')}"
                    for place in range(1, 6)
                ),
                "dslaunch: also failed: 3 more",
            ],
        ),
    ],
)
def test_the_last_word_is_who_failed_first(
    failures: tuple[RankFailure | HostFailure, ...], lines: list[str]
) -> None:
    screen = Screen()
    culprit, others = (failures[0], failures[1:]) if failures else (None, ())
    screen.console.report(
        Verdict(culprit=culprit, others=others, interrupted_by=None, phases_s=()), took_s=0.81
    )
    assert screen.out == b""
    assert screen.err.decode("utf-8", "replace").splitlines() == lines


def test_an_interrupted_job_did_not_end_well() -> None:
    screen = Screen()
    screen.console.report(Verdict(culprit=None, others=(), interrupted_by=2, phases_s=()), took_s=1.0)
    assert screen.err == b""


@pytest.mark.parametrize("code", [0, 1])
def test_the_last_line_says_where_the_log_files_are(tmp_path: Path, code: int) -> None:
    err = io.BytesIO()
    logs = LogOptions(log_dir=str(tmp_path), each_rank_dir=str(tmp_path / "each"))
    console = Console(log_level="info", logs=logs, out=io.BytesIO(), err=err)
    console.begin(ORIGINS)
    culprit = rank(3, code=code) if code else None
    console.report(Verdict(culprit=culprit, others=(), interrupted_by=None, phases_s=()), took_s=1.0)
    assert console.drain(10)
    places = [f"log files: {(tmp_path / 'latest').resolve()}/attempt_0", f"log files: {tmp_path}/each"]
    lines = err.getvalue().decode().splitlines()
    if code:
        assert lines[1:] == [f"dslaunch: {place}" for place in places]
    else:
        words = "dslaunch: 4 workers ended with code 0 after 1.0 s on 2 hosts"
        assert lines == ["; ".join([words, *places])]


def test_a_job_that_ended_well_says_how_far_it_came() -> None:
    screen = Screen()
    row = {"step": 500, "steps": 50, "step_s": 4.0, "loss": 2.31416}
    screen.console.telemetry.take_metrics("w0", Metrics(0.0, {"0": row, "1": {**row, "loss": 7}}, {}))
    verdict = Verdict(culprit=None, others=(), interrupted_by=None, phases_s=())
    screen.console.report(verdict, took_s=38.0, written="report.json")
    assert screen.err.decode() == (
        "dslaunch: 4 workers ended with code 0 after 38 s on 2 hosts; step 500, 12.5 steps/s, loss 2.314; "
        "report: report.json\n"
    )


def test_on_a_terminal_lines_break_between_words() -> None:
    err = Terminal()
    console = console_of(io.BytesIO(), err)
    words = [f"word-{place}" for place in range(40)]
    console.warn(" ".join(words) + " " + "x" * 100)
    assert console.drain(10)
    lines = re.sub(r"\x1b\[\d*m", "", err.getvalue().decode().removeprefix("\r\x1b[K")).splitlines()
    assert len(lines) > 4
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1] == "    " + "x" * 100  # nowhere to break it
    assert all(line.startswith("    ") for line in lines[1:])
    assert " ".join(lines).split() == ["dslaunch:", "warning:", *words, "x" * 100]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (99.4, "99 s"), (99.6, "1 min 40 s"),
     (3599.6, "1 h 0 min"), (11000, "3 h 3 min")],
)  # fmt: skip
def test_a_time_is_shown_in_the_units_of_people(seconds: float, text: str) -> None:
    assert shown_time(seconds) == text


def test_evidence_stands_before_the_traceback_and_the_traceback_instead_of_the_last_lines() -> None:
    screen = Screen()
    culprit = RankFailure(
        rank=3,
        local_rank=1,
        host="w0",
        pid=7,
        code=137,
        signal=9,
        at_s=1.0,
        evidence=("the kernel killed it for memory (cgroup limit 512 MiB)", "core dumped"),
        message="OSError: disk",
        traceback=("Traceback", "E"),
        last_lines=("bye",),
    )
    screen.console.report(Verdict(culprit=culprit, others=(), interrupted_by=None, phases_s=()), took_s=0.81)
    assert screen.err.decode().splitlines() == [
        "dslaunch: rank 3 on w0 (local rank 1, pid 7) was killed by SIGKILL (9); it failed first",
        "dslaunch: evidence: the kernel killed it for memory (cgroup limit 512 MiB)",
        "dslaunch: evidence: core dumped",
        "dslaunch: it reported: OSError: disk",
        "dslaunch: traceback of rank 3:",
        "    Traceback",
        "    E",
    ]


def failure(console: Console) -> LaunchError:
    """What the console says of its own streams, once it has tried."""
    console.output(0, 1, "a\n")
    assert console.drain(10)
    assert console.failure is not None
    return console.failure


def test_a_reader_that_went_away_is_one_sentence_and_the_exit_code_of_sigpipe() -> None:
    found = failure(console_of(Full(errno.EPIPE), io.BytesIO()))
    assert (str(found), found.exit_code) == ("no process reads stdout any more", 141)


def test_a_full_disk_is_one_sentence() -> None:
    found = failure(console_of(Full(errno.ENOSPC), io.BytesIO()))
    assert str(found).startswith("cannot write to stdout: No space left on device; ")
    assert found.exit_code == 2


def test_a_stream_that_failed_does_not_hold_up_the_other_nor_the_workers() -> None:
    err = io.BytesIO()
    console = console_of(Full(errno.EPIPE), err)
    done: list[int] = []
    for number in range(100):
        console.output(0, 1, "a\n", lambda number=number: done.append(number))  # type: ignore[misc]
    console.say("still here")
    assert console.drain(10)
    assert done == list(range(100))
    assert err.getvalue() == b"dslaunch: still here\n"


def test_nobody_waits_for_a_reader_that_does_not_read() -> None:
    read, write = os.pipe()
    with open(read, "rb") as reader, open(write, "wb", buffering=0) as stream:
        console = console_of(stream, io.BytesIO())
        for _ in range(10):
            console.output(0, 1, "x" * 99_992 + "\n")
        assert not console.drain(0.05)
        assert len(reader.read(1_000_000)) == 1_000_000
        assert console.drain(10)


def test_a_reader_that_takes_nothing_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a writer that was held back may go on, once for each text, and what comes later is dropped."""
    monkeypatch.setattr(console_module, "URGENT_S", 0.05)
    read, write = os.pipe()
    done: list[int] = []
    with open(read, "rb") as reader, open(write, "wb", buffering=0) as stream:
        console = console_of(stream, io.BytesIO())
        for number in range(100):
            console.output(0, 1, "x" * 9_992 + "\n", lambda number=number: done.append(number))  # type: ignore[misc]
        console.give_up_if_stuck(is_urgent=True)
        assert len(done) < 100
        deadline = time.monotonic() + 10
        while len(done) < 100 and time.monotonic() < deadline:
            console.give_up_if_stuck(is_urgent=True)
        assert sorted(done) == list(range(100))
        console.output(0, 1, "late\n", lambda: done.append(100))
        assert done[-1] == 100
        assert console.drain(0)
        os.set_blocking(read, False)
        while reader.read():  # the thread that was writing can end what it had begun
            time.sleep(0.01)
    assert len(done) == 101


def test_a_pipe_that_does_not_block_gets_everything_all_the_same() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    received = bytearray()

    def receive() -> None:
        while data := os.read(read, 1 << 16):
            received.extend(data)

    reader = threading.Thread(target=receive)
    with open(write, "wb", buffering=0) as stream:
        console = console_of(stream, io.BytesIO())
        threading.Timer(0.05, reader.start).start()
        for number in range(3):
            console.output(0, 1, f"{number}" * 200_000 + "\n")
        assert console.drain(10)
    while not reader.ident:
        time.sleep(0.001)
    reader.join()
    os.close(read)
    assert received == b"".join(b"w0:0 | " + b"%d" % number * 200_000 + b"\n" for number in range(3))

"""What hosts say reaches a terminal as text on one line: it colors nothing, moves nothing, and is not
taken for our words.
"""

from __future__ import annotations

import io
from typing import Any

import pytest

from dslaunch.launcher.command_line.cli import main
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.fleet.check_summary import as_text, summary_of
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.rendezvous.messages import Failed, NewsDecoder, encode_news
from dslaunch.launcher.wire.frames import (
    MAGIC,
    Exited,
    Hello,
    Listen,
    Listening,
    Prepare,
    Problem,
    Ready,
    Start,
    Started,
)
from dslaunch.launcher.wording import MAX_TEXT, cleaned
from tests.launcher.controller import test_controller
from tests.launcher.fleet import test_each_host
from tests.launcher.fleet.test_check import instead_of, look
from tests.launcher.memory_host import Change, MemoryHost, after, first

HOSTILE = (
    "\x1b[2J\x1b[1;1Hlook\n"
    "dslaunch: all went well\r\n"
    "dslaunch: node9: it failed first\x1b]0;title\x07\x9b31m\x08\udc9b"
)
SHOWN = "look dslaunch: all went well  dslaunch: node9: it failed first?31m??"


def assert_harmless(text: str, *, has_words: bool = True) -> None:
    """Whatever was said, a line that begins as ours do is ours."""
    assert all(one.isprintable() or one == "\n" for one in text), text
    assert not any(
        line.startswith(("dslaunch: all went well", "dslaunch: node9")) for line in text.splitlines()
    )
    assert ("it failed first" in text) == has_words, text


def test_text_is_shown_on_one_line_without_what_steers_a_terminal() -> None:
    assert cleaned(HOSTILE) == SHOWN
    assert cleaned("plain words: \u00e4 \u4e2d") == "plain words: \u00e4 \u4e2d"
    assert cleaned("x" * 100_000_000) == "x" * MAX_TEXT + "..."
    assert cleaned("\n" * 100_000_000).endswith(" ...")


RAW = HOSTILE.encode("utf-8", "replace")
HELLO = Hello(hostname=HOSTILE, python=HOSTILE, reached_at=HOSTILE, num_devices=0, pid=7)
EVIDENCE = {
    "evidence": [HOSTILE],
    "message": HOSTILE,
    "traceback": [HOSTILE, "\tin train"],
    "last_lines": [HOSTILE],
}


@pytest.mark.parametrize(
    "change",
    [
        first(MAGIC, HELLO, Problem(HOSTILE, 3)),
        first(RAW * 3, b""),
        first(MAGIC, RAW),
        after(Prepare, Problem(HOSTILE, 2)),
        after(Prepare, Ready(29500, [HOSTILE]), Problem(HOSTILE, 3)),
        after(Listen, Listening(29500, [HOSTILE], HOSTILE), Problem(HOSTILE, 3)),
        after(Start, Started(0, 7), Exited(0, 3, 0, 1.0, EVIDENCE)),
        after(Start, Started(0, 7), Exited(0, 3, 0, 1.0, {**EVIDENCE, "traceback": []})),
    ],
)
def test_a_job_shows_it_cleaned(change: Change) -> None:
    _, err = test_controller.run(MemoryHost((0, 1), change), MemoryHost((2, 3)))
    assert_harmless(err)


@pytest.mark.parametrize("change", [after(Prepare, Problem(HOSTILE, 3)), first(RAW, b"")])
def test_exec_shows_it_cleaned(change: Change) -> None:
    err = io.BytesIO()
    console = Console(log_level="info", out=io.BytesIO(), err=err)
    _, sentences, _ = test_each_host.run(MemoryHost((0,), change))
    for line in sentences:
        console.error(line)
    console.drain()
    assert_harmless(err.getvalue().decode())


FACTS = {
    "hostname": HOSTILE,
    "boot_id": "b",
    "kernel": HOSTILE,
    "machine": HOSTILE,
    "num_cpus": 1,
    "numactl": HOSTILE,
}


@pytest.mark.parametrize(
    "host",
    [
        MemoryHost(change=instead_of("system", {"problem": HOSTILE})),
        MemoryHost(change=instead_of("system", {**FACTS, "memlock": 1})),
        MemoryHost(change=instead_of("python", {**FACTS, "memlock": 1})),
        MemoryHost(change=first(RAW, b"")),
        MemoryHost(change=first(MAGIC, RAW)),
        LaunchError(HOSTILE),
    ],
)
def test_a_check_shows_it_cleaned(host: MemoryHost | Exception) -> None:
    found = look(host, timeout_s=5.0)
    text = as_text(found, summary_of(found))
    assert_harmless(text, has_words="it failed first" in text)


def test_an_error_that_ends_the_command_is_cleaned(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from dslaunch.launcher.run import run_job

    def refuse(*given: Any) -> int:
        raise LaunchError(f"slots=auto: node1: {HOSTILE}")

    monkeypatch.setattr(run_job, "run", refuse)
    with pytest.raises(SystemExit):
        main(["train.py"])
    assert_harmless(capfd.readouterr().err)


def test_what_nodes_without_ssh_tell_each_other_is_cleaned() -> None:
    (news,) = NewsDecoder().feed(encode_news(Failed(1, -1, -1, 0, 3, 0, HOSTILE, 0.0)))
    assert isinstance(news, Failed)
    assert news.message == SHOWN


def test_stacks_that_a_rank_shows_are_cleaned() -> None:
    err = io.BytesIO()
    console = Console(log_level="info", out=io.BytesIO(), err=err)
    console.show(f"rank 0: {HOSTILE}", [HOSTILE, "\x1b[31mred\x1b[0m"])
    console.drain()
    assert_harmless(err.getvalue().decode())
    assert err.getvalue().endswith(b"\n    red\n")

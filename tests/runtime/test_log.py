"""What is logged and printed, and on which ranks."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.runtime import log
from dslaunch.runtime.errors import ConfigError
from tests.runtime.ranks import Ranks

RANKS = ([0], [1], [0, 1], [-1], [-1, 5], [], None, [7])


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    level, handlers = log.logger.level, list(log.logger.handlers)
    yield
    log.logger.setLevel(level)
    log.logger.handlers[:] = handlers


def _texts(rank: int) -> tuple[list[str | None], str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        log.print_dist("hello", [1])
        log.print_dist("nobody")
    return [log.get_dist_msg("x", ranks) for ranks in RANKS], out.getvalue()


def test_a_message_is_for_the_ranks_that_are_named(ranks: Ranks) -> None:
    (first, first_out), (second, second_out) = ranks(_texts, world_size=2)
    zero, one = "[Rank 0] x", "[Rank 1] x"
    assert first == [zero, None, zero, zero, zero, None, None, None]
    assert second == [None, one, one, one, one, None, None, None]
    assert (first_out, second_out) == ("", "[Rank 1] hello\n")


def test_without_a_group_everything_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dslaunch"):
        for given in RANKS:
            log.log_dist("said", ranks=given)
        log.log_dist("quiet", ranks=[0], level=logging.DEBUG)
        log.log_dist("100%", level=logging.ERROR)
        for _ in range(3):
            log.log_dist_once("once", [0])
            log.warning_once("one warning %s", 7)
            log.logger.warning_once("another")  # type: ignore[attr-defined]  # as programs call it
        log.print_configuration(argparse.Namespace(b=2, a="x"), "args")
    texts = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert texts == [
        *[("INFO", "[Rank -1] said")] * len(RANKS),
        ("ERROR", "[Rank -1] 100%"),
        ("INFO", "[Rank -1] once"),
        ("WARNING", "one warning 7"),
        ("WARNING", "another"),
        ("INFO", "args:"),
        ("INFO", "  a............................. x"),
        ("INFO", "  b............................. 2"),
    ]
    assert caplog.records[0].filename == "test_log.py"
    assert log.logger is logging.getLogger("dslaunch")


def test_a_level_is_set_by_its_word_and_what_it_lets_through_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = logging.getLogger("dslaunch.test_log")
    own.propagate = False
    log.set_log_level_from_string("INFO", own)
    own.info("shown")
    own.debug("hidden")
    log.set_log_level_from_string("error", own)
    own.warning("hidden, too")
    assert len(own.handlers) == 1
    shown = capsys.readouterr().err
    assert shown.endswith("] shown\n")
    assert shown.count("\n") == 1
    log.set_log_level_from_string("info")
    assert log.get_current_level() == logging.INFO
    assert [log.should_log_le(word) for word in ("debug", "info", "warning")] == [False, True, True]
    assert log.get_log_level_from_string("Critical") == logging.CRITICAL
    with pytest.raises(
        ValueError, match="log level 'loud': must be one of debug, info, warning, error, critical"
    ):
        log.set_log_level_from_string("loud")


def test_a_dict_is_written_with_the_rank(tmp_path: Path) -> None:
    log.print_json_dist({"loss": 1.5}, [0], tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == {"loss": 1.5, "rank": -1}
    with pytest.raises(ConfigError, match="give the file"):
        log.print_json_dist({}, [0])


def test_a_call_as_text() -> None:
    assert log.call_to_str("load") == "load()"
    assert log.call_to_str("load", 1, "a") == "load(1, 'a')"
    assert log.call_to_str("load", 1, tag="b", n=None) == "load(1, tag='b', n=None)"
    assert log.call_to_str("load", tag="b") == "load(tag='b')"


SAYS_HELLO = """
import os, sys, torch.distributed
for level in sys.argv[1:]:
    print(f"as {level}:", file=sys.stderr)
    if os.fork():
        assert os.wait()[1] == 0
        continue
    os.environ["DSLAUNCH_LOG_LEVEL"] = level
    from dslaunch.utils import log_dist
    log_dist("hello", ranks=[0])
    break
"""


@pytest.mark.slow
def test_a_variable_says_from_which_level_on_messages_are_shown() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAYS_HELLO, "", "info", "loud"], capture_output=True, text=True, check=True
    )
    assert [line.split("] ", 3)[-1] for line in done.stderr.splitlines()] == [
        "as :",
        "as info:",
        "[Rank -1] hello",
        "as loud:",
        "DSLAUNCH_LOG_LEVEL='loud': must be one of debug, info, warning, error, critical; "
        "it counts as warning",
    ]

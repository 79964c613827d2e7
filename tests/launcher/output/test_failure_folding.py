"""One failure reads as one: what ranks say of the connections that they lost by it is a line for each."""

from __future__ import annotations

import time

import pytest

from dslaunch.launcher.output import failure_folding
from dslaunch.launcher.output.failure_folding import FailureFolding

HEAD = "[rank{0}]: Traceback (most recent call last):\n"
OWN = HEAD + '[rank{0}]:   File "train.py", line 8, in <module>\n[rank{0}]: ValueError: bad sample\n'
LOST = (
    HEAD
    + '[rank{0}]:   File "train.py", line 9, in <module>\n'
    + '[rank{0}]:   File "/site-packages/torch/distributed/distributed_c10d.py", line 3, in all_reduce\n'
    + "[rank{0}]: RuntimeError: Connection closed by peer [127.0.0.1]:1419.\n[rank{0}]:   more of it\n"
)
WEB = HEAD + '[rank{0}]:   File "data.py", line 8, in get\n[rank{0}]: OSError: Connection reset by peer\n'
PREFACE = "dslaunch: rank {0}: reduce_scatter of unit 'root' (step 4) failed after 2.5 s:\n"
HINT = " (--fold_failures no shows the traceback)\n"
FOLDED = "lost another rank: RuntimeError: Connection closed by peer" + HINT


class Shown:
    """What is shown of each rank, whether taken or passed by."""

    def __init__(self) -> None:
        self.of: dict[int, str] = {}
        self.folding = FailureFolding(self._show)
        self.folding.begin()

    def _show(self, rank: int, body: bytes) -> None:
        self.of[rank] = self.of.get(rank, "") + body.decode()

    def put(self, rank: int, text: str) -> None:
        for line in text.format(rank).splitlines(keepends=True):  # as they may come
            if not self.folding.put(rank, line.encode()):
                self._show(rank, line.encode())


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_ranks_that_lost_the_one_that_failed_are_a_line_each(shown: Shown) -> None:
    shown.put(1, PREFACE + LOST + "bye\n")
    shown.put(2, "a step\n" + OWN)
    assert shown.of == {2: "a step\n" + OWN.format(2)}, "an error of its own is shown at once"
    shown.folding.failed()
    shown.put(0, LOST + "closing\n")
    shown.put(3, LOST)
    shown.folding.look(is_end=True)
    assert shown.of[0] == FOLDED + "closing\n"
    assert shown.of[3] == FOLDED
    what = "reduce_scatter of unit 'root' (step 4) failed after 2.5 s"
    assert shown.of[1] == f"lost another rank: {what}: Connection closed by peer{HINT}bye\n"


def test_a_second_failure_of_its_own_is_shown_whole(shown: Shown) -> None:
    shown.put(2, OWN)
    shown.folding.failed()
    for rank, text in ((0, WEB), (1, OWN), (3, PREFACE + OWN)):
        shown.put(rank, text)
        assert shown.of[rank] == text.format(rank)


def test_what_the_runtime_says_on_all_ranks_is_shown_once(shown: Shown) -> None:
    for rank in range(3):
        shown.put(rank, "dslaunch: checkpoint a cannot be written\na line of the program\n")
    assert shown.of[0] == "dslaunch: checkpoint a cannot be written\na line of the program\n"
    assert shown.of[1] == shown.of[2] == "a line of the program\n"
    assert shown.folding.has_said("dslaunch: checkpoint a cannot be written")
    assert not shown.folding.has_said("a line of the program")


def test_a_lost_connection_that_ends_nothing_is_shown(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    shown.put(1, LOST + "again\n")
    shown.folding.look()
    assert 1 not in shown.of
    began = time.monotonic()
    monkeypatch.setattr(failure_folding.time, "monotonic", lambda: began + 60)
    shown.folding.look()
    assert shown.of[1] == LOST.format(1) + "again\n"


@pytest.mark.parametrize("text", [HEAD, HEAD + "no frame\n", PREFACE + "no traceback\n", LOST[:-30] + "\n"])
def test_what_is_no_whole_traceback_is_not_lost(shown: Shown, text: str) -> None:
    shown.put(1, text)
    shown.folding.look(is_end=True)
    assert shown.of[1] == text.format(1)


def test_a_traceback_that_was_shown_is_known(shown: Shown) -> None:
    link = "[rank{0}]: \n[rank{0}]: During handling of the above exception, another exception occurred:\n"
    both = (OWN + link + "[rank{0}]: \n" + OWN.replace("bad", "worse") + "[rank{0}]:   more of it\n").format(
        1
    )
    shown.put(1, both)
    assert shown.of[1] == both
    assert shown.folding.has_shown(1, both.splitlines())
    assert not shown.folding.has_shown(1, ["Traceback (most recent call last):", "KeyError: 1"])
    shown.put(2, LOST)
    shown.folding.failed()
    assert not shown.folding.has_shown(2, LOST.format(2).splitlines())

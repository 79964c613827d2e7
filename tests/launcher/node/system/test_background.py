from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dslaunch.launcher.node.system.background import in_background
from dslaunch.launcher.node.system.lean_stdlib import Selector
from dslaunch.launcher.wire.frames import Frame, Pong, Problem

TIMEOUT_S = 20.0


@pytest.fixture
def selector() -> Iterator[Selector]:
    one = Selector()
    yield one
    one.close()


def wait(selector: Selector) -> None:
    assert selector.wait(TIMEOUT_S) == 1


def test_the_answer_is_taken_by_whoever_waits_and_not_before(selector: Selector) -> None:
    may_answer = threading.Event()
    taken: list[tuple[Frame, threading.Thread]] = []

    def work() -> Frame:
        assert threading.current_thread() is not threading.main_thread()
        assert may_answer.wait(TIMEOUT_S)
        return Pong(1, 2.0)

    in_background(selector, work, lambda answer: taken.append((answer, threading.current_thread())))
    assert selector.wait(0) == 0
    may_answer.set()
    wait(selector)
    assert taken == [(Pong(1, 2.0), threading.current_thread())]
    assert len([*selector]) == 0


def test_work_that_fails_is_a_problem_and_a_traceback(
    selector: Selector, capfd: pytest.CaptureFixture[str]
) -> None:
    taken: list[Frame] = []

    def work() -> Frame:
        raise ValueError("no such thing")

    in_background(selector, work, taken.append)
    wait(selector)
    assert taken == [Problem("cannot prepare the job: ValueError: no such thing", 3)]
    assert "Traceback" in capfd.readouterr().err

"""What agents have in place of slow modules does what these do."""

from __future__ import annotations

import os
import signal
from importlib import import_module
from typing import Any

import pytest

from dslaunch.launcher.node.system.lean_stdlib import Selector, name_of_signal

LEAN: Any = import_module("dslaunch.launcher.node.system.lean_stdlib")


@pytest.mark.parametrize(
    "one", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD]
)
def test_a_signal_has_its_name(one: signal.Signals) -> None:
    assert name_of_signal(one) == one.name


def test_a_number_without_a_name_is_itself() -> None:
    assert name_of_signal(0) == "0"


def test_suppress_hides_these_errors_and_no_others() -> None:
    with LEAN.suppress(OSError, KeyError):
        raise FileNotFoundError
    with LEAN.suppress(OSError):
        pass
    with pytest.raises(ValueError, match="x"), LEAN.suppress(OSError):
        raise ValueError("x")


def test_a_selector_does_what_is_asked_for_when_it_can_be_done() -> None:
    selector = Selector()
    read, write = os.pipe()
    done: list[str] = []
    selector.on_read(read, lambda: done.append("read"))
    assert selector.wait(0) == 0
    selector.on_write(write, lambda: done.append("write"))
    assert selector.wait(1) == 1
    os.write(write, b"x")
    assert selector.wait(1) == 2
    assert sorted(done) == ["read", "write", "write"]
    assert write in selector
    selector.forget(write)
    selector.forget(write)
    assert [*selector] == [read]
    os.close(write)
    os.close(read)
    selector.forget(read)
    assert selector.wait(0) == 0
    selector.close()


def test_an_act_may_forget_a_file_that_is_ready_too() -> None:
    selector = Selector()
    ends = [os.pipe() for _ in range(2)]
    done: list[int] = []

    def forget_the_other(place: int) -> None:
        done.append(place)
        selector.forget(ends[1 - place][0])

    for place, (read, write) in enumerate(ends):
        os.write(write, b"x")
        selector.on_read(read, lambda place=place: forget_the_other(place))  # type: ignore[misc]
    selector.wait(1)
    assert len(done) == 1
    for one in ends:
        for fd in one:
            os.close(fd)
    selector.close()

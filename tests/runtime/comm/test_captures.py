"""Threads of ours leave a CUDA graph alone that the program captures meanwhile.

On the fake device each test fails whose threads would break one: see tests/fake_cuda/ranks.py.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, cast

import pytest
import torch

from dslaunch.runtime.comm import captures
from dslaunch.runtime.comm.watchdog import watchdog
from dslaunch.runtime.comm.watchdog.watchdog import Watchdog


class Driver:
    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.modes: list[int] = []

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.modes.append(mode._obj.value)
        return self.status


@pytest.mark.parametrize("status", [0, 3])
def test_the_driver_is_told_that_only_captures_of_the_same_thread_count(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    driver = Driver(status)
    monkeypatch.setattr(captures, "_driver", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    captures.ignore_captures()
    assert driver.modes == [1]


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_without_a_driver_nothing_is_said(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    captures.ignore_captures()


def _no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def test_the_watchdog_asks_for_nothing_before_it_ignores_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(watchdog, "ignore_captures", lambda: done.append("ignores captures"))
    watching = Watchdog.__new__(Watchdog)
    watching._stopped, watching._poll_s, watching._look_s = threading.Event(), 0.0, 0.0
    ended = threading.Event()

    def overdue(_: Watchdog) -> None:
        done.append("asks")
        watching._stopped.set()

    class Board:
        def close(self) -> None:
            ended.set()

    watching._board = cast(Any, Board())
    for name, answer in (("_overdue", overdue), ("_is_of_this_group", lambda _: True)):
        monkeypatch.setattr(Watchdog, name, answer)
    for name in ("_tell_wait", "_compare_paths", "_look"):
        monkeypatch.setattr(Watchdog, name, lambda *_: None)
    thread = threading.Thread(target=watching._run)
    thread.start()
    thread.join(60)
    assert ended.is_set()
    assert done == ["ignores captures", "asks"]

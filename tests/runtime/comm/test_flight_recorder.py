"""What of a rank's collectives is under way, and what it stands still for."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from dslaunch.runtime.comm.flight_recorder import Flight, FlightRecorder


class Work:
    """As NCCL's: under way until the device says otherwise."""

    is_over = False

    def is_completed(self) -> bool:
        return self.is_over


def begun(recorder: FlightRecorder, what: str) -> tuple[Flight, Work]:
    work: Any = Work()
    return recorder.begin("all_gather", what, nbytes=4, lane=0).start(lambda: work), work


def test_a_host_that_waits_for_the_device_waits_for_the_oldest_collective() -> None:
    recorder = FlightRecorder()
    first, first_work = begun(recorder, "unit 'a'")
    second, second_work = begun(recorder, "unit 'b'")
    with recorder.waiting_for_device():
        assert (first.is_awaited, second.is_awaited) == (True, False)
    assert not first.is_awaited
    first_work.is_over = True
    with recorder.waiting_for_device():
        assert (first.is_awaited, second.is_awaited) == (False, True)
    second_work.is_over = True
    before = recorder.quiet_since
    with recorder.waiting_for_device():
        assert not second.is_awaited
    assert recorder.quiet_since > before


class Captured:
    """An event in a CUDA graph that is being captured: to ask whether it has happened breaks the capture."""

    def query(self) -> bool:
        raise AssertionError("asked in a capture")


def test_no_event_is_asked_for_while_the_program_captures_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    recorder = FlightRecorder()
    first, _ = begun(recorder, "unit 'a'")
    first._event = cast(Any, Captured())
    begun(recorder, "unit 'b'")
    assert not first.is_over
    assert len(recorder.under_way()) == 2

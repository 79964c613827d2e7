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
    """What is in a CUDA graph that is being captured: to ask whether it has happened breaks the capture."""

    def query(self) -> bool:
        raise AssertionError("asked in a capture")

    is_completed = query

    def wait(self) -> None:
        pass


def begin_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_no_event_is_asked_for_while_the_program_captures_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FlightRecorder()
    first, second = (begun(recorder, what)[0] for what in ("unit 'a'", "unit 'b'"))
    first._event, second._work = cast(Any, Captured()), cast(Any, Captured())
    begin_capture(monkeypatch)
    begun(recorder, "unit 'c'")
    assert not first.is_over
    assert not second.is_over
    assert [flight.label.what for flight in recorder.under_way()] == ["unit 'a'", "unit 'b'"]


def test_what_is_captured_counts_as_over_and_is_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs with the graph, as often as that does, or not at all."""
    recorder = FlightRecorder()
    begin_capture(monkeypatch)
    flight = recorder.begin("all_gather", "unit 'a'", nbytes=4, lane=0).start(lambda: cast(Any, Captured()))
    monkeypatch.undo()  # another thread asks, or this one later
    assert flight.is_over
    begin_capture(monkeypatch)
    flight.wait()
    monkeypatch.undo()
    assert flight.is_over
    assert recorder.under_way() == ()

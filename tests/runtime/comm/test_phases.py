"""Where the time of a step goes, by made-up clocks."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

from dslaunch.runtime.comm import phases
from dslaunch.runtime.comm.phases import BACKWARD, COMM, DATA, EVALUATING, FORWARD, OPTIMIZER, PAUSED, Phases

CALLS = {
    "f": FORWARD,
    "b": BACKWARD,
    "o": OPTIMIZER,
    "d": DATA,
    "e": EVALUATING,
    "s": PAUSED,
}


class Clock:
    """Each tick is a second."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


class Event:
    """A mark of a GPU that is as far as `done_s`."""

    made = 0
    done_s = 0.0
    now_s = 0.0

    def __init__(self, **_: bool) -> None:
        Event.made += 1
        self.at_s = -1.0

    def record(self, stream: object) -> None:
        self.at_s = Event.now_s

    def query(self) -> bool:
        return self.at_s <= Event.done_s

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query()
        return (other.at_s - self.at_s) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One that is slow, and its streams: the last one is the current one."""
    streams = ["main"]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[-1])
    monkeypatch.setattr(Event, "now_s", 0.0)
    monkeypatch.setattr(Event, "done_s", 0.0)
    return streams


def times_of(story: str, device: str, clock: Clock) -> dict[str, float]:
    """Act it out: a letter is a call of one second, ( ) is around what is in it, w a wait, . a second of the
    program, comma the end of a micro batch, | that of a step.
    """
    made = Phases(torch.device(device))
    within: list[Any] = []
    for at, letter in enumerate(story):
        if letter in CALLS:
            call = made.during(CALLS[letter])
            call.__enter__()
            clock.time_s += 1
            if story[at + 1 : at + 2] == "(":
                within.append(call)
            else:
                call.__exit__(None, None, None)
        elif letter == "w":
            before = made.begin(COMM)
            clock.time_s += 1
            made.end(COMM, before)
        elif letter == ".":
            clock.time_s += 1
        elif letter == ")":
            within.pop().__exit__(None, None, None)
        elif letter == ",":
            made.end_micro_batch()
        elif letter == "|":
            made.end_step()
    return made.take()


@pytest.mark.parametrize(
    ("story", "wanted"),
    [
        ("fbo|", {"forward": 1, "backward": 1, "optimizer": 1}),
        ("fbo|...fbo|", {"forward": 2, "backward": 2, "optimizer": 2, "data": 3}),
        ("f(w)b(ww)o(w)|", {"forward": 1, "backward": 1, "optimizer": 1, "comm": 4}),
        # two micro batches: what lies before a forward are data
        ("fb..fbo|", {"forward": 2, "backward": 2, "optimizer": 1, "data": 2}),
        # the loss; what comes between the backward and the step; the scheduler
        ("f.b.o.|", {"forward": 2, "backward": 2, "optimizer": 2}),
        # loss.backward() by the program
        ("f..o|", {"forward": 1, "backward": 2, "optimizer": 1}),
        # the same for each of two micro batches
        ("f..,.f..o|", {"forward": 2, "backward": 4, "optimizer": 1, "data": 1}),
        ("fb.,.fbo|", {"forward": 2, "backward": 2, "optimizer": 1, "data": 2}),
        # the program waits for others while it gets data
        ("fbo|.w.fbo|", {"forward": 2, "backward": 2, "optimizer": 2, "data": 2, "comm": 1}),
        ("fbo|.s(w).fbo|", {"forward": 2, "backward": 2, "optimizer": 2, "data": 2, "paused": 2}),
        ("fbo|.e.e(w)..fbo|", {"forward": 2, "backward": 2, "optimizer": 2, "paused": 7}),
        # a pipeline: all of a batch is a forward but for the backwards and the waits
        ("d(w)f(f.wb.b)o|", {"data": 1, "comm": 2, "forward": 4, "backward": 2, "optimizer": 1}),
        # a step that has not ended is not told
        ("fbo|.fb", {"forward": 1, "backward": 1, "optimizer": 1}),
        ("f", {}),
    ],
)
@pytest.mark.parametrize(("device", "most_marks"), [("cpu", 4096), ("cpu", 3), ("cuda", 4096), ("cuda", 3)])
@pytest.mark.usefixtures("gpu")
def test_each_second_is_in_one_phase(
    story: str, wanted: dict[str, int], device: str, most_marks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(phases, "clock_s", clock)
    monkeypatch.setattr(phases, "_MOST_MARKS", most_marks)
    monkeypatch.setattr(Event, "record", lambda event, _: setattr(event, "at_s", clock()))
    monkeypatch.setattr(Event, "done_s", math.inf)
    found = times_of(story, device, clock)
    num_steps = story.count("|")
    expected = {f"{name}_s": seconds for name, seconds in wanted.items()}
    if num_steps:
        expected |= {"step_s": sum(wanted.values()), "steps": num_steps}
    assert {name: value for name, value in found.items() if value} == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("gpu")
def test_a_wait_of_another_thread_is_none_of_the_program(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "clock_s", lambda: Event.now_s)
    monkeypatch.setattr(Event, "done_s", math.inf)
    made = Phases(torch.device(device))

    def wait() -> None:
        before = made.begin(COMM)
        Event.now_s += 1
        made.end(COMM, before)

    for phase, times in (
        (FORWARD, {"forward_s": 1.0, "step_s": 1.0}),
        (BACKWARD, {"comm_s": 1.0, "step_s": 1.0}),  # which on a GPU is a thread of autograd's
    ):
        with made.during(phase):
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
        made.end_step()
        assert made.take() == {**times, "steps": 1}


def test_times_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Phases(torch.device("cpu"))
    with made.during(FORWARD):
        pass
    made.end_step()
    assert made.take()["steps"] == 1
    assert made.take() == {}


def test_times_of_a_gpu_are_told_when_it_is_so_far(gpu: list[str]) -> None:
    made = Phases(torch.device("cuda", 0))

    def wait() -> None:
        before = made.begin(COMM)
        Event.now_s += 1
        made.end(COMM, before)

    def step() -> None:
        with made.during(FORWARD):
            Event.now_s += 1
            wait()
        gpu.append("beside")
        wait()  # that stream is not what computes
        gpu.pop()
        made.end_step()

    step()
    assert made.take() == {}
    step()
    Event.done_s = 5.0  # in the middle of the second step
    assert made.take() == {"forward_s": 1.0, "comm_s": 1.0, "optimizer_s": 1.0, "step_s": 3.0, "steps": 1}
    events = Event.made
    for _ in range(50):
        step()
        Event.done_s = Event.now_s
        assert made.take()["steps"] >= 1
    assert Event.made - events < 10  # they are used again

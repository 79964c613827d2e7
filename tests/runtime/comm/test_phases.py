"""Where the time of a step goes, by made-up clocks."""

from __future__ import annotations

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


def times_of(story: str, monkeypatch: pytest.MonkeyPatch, *, most_marks: int = 4096) -> dict[str, float]:
    """Act it out: a letter is a call of one second, ( ) is around what is in it, w a wait, . a second of the
    program, | the end of a step.
    """
    clock = Clock()
    monkeypatch.setattr(phases, "clock_s", clock)
    monkeypatch.setattr(phases, "_MOST_MARKS", most_marks)
    made = Phases(torch.device("cpu"))
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
@pytest.mark.parametrize("most_marks", [4096, 3])
def test_each_second_is_in_one_phase(
    story: str, wanted: dict[str, int], most_marks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = times_of(story, monkeypatch, most_marks=most_marks)
    num_steps = story.count("|")
    expected = {f"{name}_s": seconds for name, seconds in wanted.items()}
    if num_steps:
        expected |= {"step_s": sum(wanted.values()), "steps": num_steps}
    assert {name: value for name, value in found.items() if value} == expected


def test_a_wait_of_another_thread_is_none_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Phases(torch.device("cpu"))
    said: list[str | None] = []
    with made.during(FORWARD):
        thread = threading.Thread(target=lambda: said.append(made.begin(COMM)))
        thread.start()
        thread.join()
    made.end_step()
    assert said == [None]
    assert "comm_s" not in made.take()


def test_times_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Phases(torch.device("cpu"))
    with made.during(FORWARD):
        pass
    made.end_step()
    assert made.take()["steps"] == 1
    assert made.take() == {}


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


def test_times_of_a_gpu_are_told_when_it_is_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = ["main"]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[-1])
    made = Phases(torch.device("cuda", 0))

    def step() -> None:
        with made.during(FORWARD):
            Event.now_s += 1
            before = made.begin(COMM)
            Event.now_s += 1
            made.end(COMM, before)
        streams.append("beside")
        assert made.begin(COMM) is None  # that stream is not what computes
        streams.pop()
        made.end_step()

    step()
    assert made.take() == {}
    step()
    Event.done_s = 3.0  # in the middle of the second step
    assert made.take() == {"forward_s": 1.0, "comm_s": 1.0, "step_s": 2.0, "steps": 1}
    Event.done_s = 4.0
    assert made.take() == {"forward_s": 1.0, "comm_s": 1.0, "step_s": 2.0, "steps": 1}
    before = Event.made
    step()
    assert Event.made == before  # they are used again

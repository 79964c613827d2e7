"""Where the time of a step goes, by made-up clocks."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from dslaunch.runtime.comm import phases
from dslaunch.runtime.comm.phases import (
    BACKWARD,
    DATA,
    EVALUATING,
    FORWARD,
    OPTIMIZER,
    PAUSED,
    Phases,
    is_one_in_eight,
)

CALLS = {
    "f": FORWARD,
    "b": BACKWARD,
    "o": OPTIMIZER,
    "d": DATA,
    "e": EVALUATING,
    "s": PAUSED,
}


class Clock:
    """Each tick is a second. Steps below 8 s are short, and of those so many are timed."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.timed: frozenset[int] = frozenset()

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


def times_of(
    story: str, device: str, clock: Clock, untimed: frozenset[int] = frozenset()
) -> Iterator[dict[str, float]]:
    """Act it out, and yield what is told at each ; and at the end. A letter is a call of one second, ( ) is
    around what is in it, w a wait, . a second of the program, comma the end of a micro batch, | that of a
    step.
    """
    made = Phases(torch.device(device))
    made._times_all = False
    clock.timed = frozenset(range(1, 700)) - untimed
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
            before = made.begin_wait() if made.is_timed else None
            clock.time_s += 1
            if before is not None:
                made.end_wait(before)
        elif letter == ".":
            clock.time_s += 1
        elif letter == ")":
            within.pop().__exit__(None, None, None)
        elif letter == ",":
            made.end_micro_batch()
        elif letter == "|":
            made.end_step(story[: at + 1].count("|") + 1)
        elif letter == ";":
            yield made.take()
    yield made.take()


@pytest.fixture(params=[("cpu", 4096), ("cpu", 3), ("cuda", 4096), ("cuda", 3)], ids=str)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device, and so many marks that they are kept until the end, or read early."""
    device, most_marks = request.param
    monkeypatch.setattr(phases, "_MOST_MARKS", most_marks)
    return str(device)


SAVING = "saving"  # a part of what is paused


def sum_of(wanted: Mapping[str, float]) -> float:
    return sum(seconds for name, seconds in wanted.items() if name != SAVING)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, gpu: list[str]) -> Clock:
    """That of the program, and of a GPU that is as far as it is."""
    made = Clock()
    monkeypatch.setattr(phases, "clock_s", made)
    monkeypatch.setattr(phases, "SHORT_S", 8.0)
    monkeypatch.setattr(phases, "is_one_in_eight", lambda step: step in made.timed)
    monkeypatch.setattr(Event, "record", lambda event, _: setattr(event, "at_s", made()))
    monkeypatch.setattr(Event, "done_s", math.inf)
    return made


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
        ("fb.,.fbo|", {"forward": 2, "backward": 3, "optimizer": 1, "data": 1}),
        # engine.module runs forward
        ("fbo|..bo|", {"forward": 3, "backward": 2, "optimizer": 2}),
        # the program waits for others while it gets data
        ("fbo|.w.fbo|", {"forward": 2, "backward": 2, "optimizer": 2, "data": 2, "comm": 1}),
        ("fbo|.s(w).fbo|", {"forward": 2, "backward": 2, "optimizer": 2, "data": 2, "paused": 2, SAVING: 2}),
        ("fbo|.e.e(w)..fbo|", {"forward": 2, "backward": 2, "optimizer": 2, "data": 1, "paused": 6}),
        # a teacher, before the forward, after it, and after the backward
        ("fbo|..e.fbo|", {"forward": 2, "backward": 2, "optimizer": 2, "data": 2, "paused": 2}),
        ("fbo|..f.e.b.e.o|", {"forward": 4, "backward": 4, "optimizer": 2, "data": 2, "paused": 2}),
        ("fbo|.f(e.)b(e(w).).o|", {"forward": 3, "backward": 4, "optimizer": 2, "data": 1, "paused": 3}),
        # a pipeline: all of a batch is a forward but for the backwards and the waits
        ("d(w)f(f.wb.b)o|", {"data": 1, "comm": 2, "forward": 4, "backward": 2, "optimizer": 1}),
        # a step that has not ended is not told
        ("fbo|.fb", {"forward": 1, "backward": 1, "optimizer": 1}),
        ("f", {}),
    ],
)
def test_each_second_is_in_one_phase(story: str, wanted: dict[str, int], place: str, clock: Clock) -> None:
    (found,) = times_of(story, place, clock)
    num_steps = story.count("|")
    expected = {f"{name}_s": seconds for name, seconds in wanted.items()}
    if num_steps:
        expected |= {"step_s": sum_of(wanted), "steps": num_steps}
    assert {name: value for name, value in found.items() if value} == expected


@pytest.mark.parametrize(
    ("story", "untimed", "wanted"),
    [
        ("f(w)bo|f(w)bo|", {2}, {"forward": 2, "backward": 2, "optimizer": 2, "comm": 2}),
        # all of it, what passed before its first call too
        ("fbo|..f|fbo|", {2}, {"forward": 3, "backward": 3, "optimizer": 3}),
        ("fbo|.w.fbo|", {2}, {"forward": 3, "backward": 3, "optimizer": 3}),
        ("fbo|fbo|fbo|fbo|", {2, 3, 4}, {"forward": 4, "backward": 4, "optimizer": 4}),
        ("fo|ffo|.fo|", {3}, {"forward": 3 + 9 / 5, "optimizer": 2 + 6 / 5}),
        ("fb,fbo|fb.,fb|", {2}, {"forward": 4, "backward": 4, "optimizer": 2}),
        # and waits of the next timed one are seen again
        ("f(w)o|f(w)bo|f(ww)o|", {2}, {"forward": 2 + 8 / 7, "optimizer": 2 + 8 / 7, "comm": 3 + 12 / 7}),
        # one that is long has a reason of its own
        ("fbo|.fffffffffbo|", {2}, {"forward": 1, "backward": 1, "optimizer": 1, "?": 12}),
        ("fo|ffffffffo|fo|", {3}, {"forward": 10, "optimizer": 3}),
        ("ffffffffbo|f|", {2}, {"forward": 8, "backward": 1, "optimizer": 1, "?": 1}),
        # pauses are known
        (
            "fbo|s(w).w.fb(w)|",
            {2},
            {"forward": 3, "backward": 3, "optimizer": 3, "paused": 2, SAVING: 2},
        ),
        (
            "fbo|.e.e(w)..f|",
            {2},
            {"forward": 1 + 1 / 3, "backward": 1 + 1 / 3, "optimizer": 1 + 1 / 3, "data": 1, "paused": 6},
        ),
        (
            "fbo|e.s.f|fbo|",
            {2},
            {"forward": 2 + 1 / 3, "backward": 2 + 1 / 3, "optimizer": 2 + 1 / 3, "paused": 4, SAVING: 1},
        ),
        # a teacher inside of a step
        (
            "fbo|f.e(w)bw|fbo|",
            {2},
            {"forward": 4 - 2 / 3, "backward": 4 - 2 / 3, "optimizer": 4 - 2 / 3, "paused": 2},
        ),
        ("fbo|bes(e)b.|", {2}, {"forward": 2, "backward": 2, "optimizer": 2, "paused": 3, SAVING: 1}),
        # a call that a step ends in
        ("f(b|)..fb|", {2}, {"forward": 3, "backward": 3}),
        ("f(b|)..fb|", {3}, {"forward": 2, "backward": 2, "data": 2}),
        ("fb|f(b|)fb|", {2}, {"forward": 3, "backward": 3}),
    ],
)
def test_an_untimed_short_step_is_as_the_timed_ones(
    story: str, untimed: set[int], wanted: dict[str, float], place: str, clock: Clock
) -> None:
    (found,) = times_of(story, place, clock, frozenset(untimed))
    expected = {f"{name}_s": seconds for name, seconds in wanted.items() if name != "?"}
    expected |= {"step_s": sum_of(wanted), "steps": story.count("|")}
    assert {name: value for name, value in found.items() if value} == pytest.approx(expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_marks_of_steps_that_nobody_asks_for_are_few(
    device: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "_MOST_MARKS", 20)
    made = Phases(torch.device(device))
    made._times_all = False
    with made.during(FORWARD):
        pass
    for number in range(500):
        clock.time_s += 1
        made.end_step(number + 2)
        assert len(made._marks) < 30
    assert made.take()["steps"] == 500


def test_a_mark_of_an_untimed_step_is_in_the_stream_that_computes(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    marked_in: list[object] = []
    monkeypatch.setattr(Event, "record", lambda _, stream: marked_in.append(stream))
    made = Phases(torch.device("cuda"))
    made._times_all = False
    for number, stream in enumerate(("first", "second", "third")):
        gpu.append(stream)
        with made.during(FORWARD):
            pass
        gpu.append(f"end of {stream}")
        made.end_step(number + 2)
    assert marked_in[2:] == ["end of first", "end of second", "end of third"]


def test_where_no_step_was_timed_they_are_as_those_before(clock: Clock) -> None:
    first, second, third = times_of("fbbo|;ffo|.fo|;.fbo|", "cpu", clock, frozenset({2, 3, 4}))
    assert first == {"forward_s": 1, "backward_s": 2, "optimizer_s": 1, "step_s": 4, "steps": 1}
    assert second == {"forward_s": 1.5, "backward_s": 3, "optimizer_s": 1.5, "step_s": 6, "steps": 2}
    assert third == {"forward_s": 1, "backward_s": 2, "optimizer_s": 1, "step_s": 4, "steps": 1}


def test_steps_that_become_long_are_all_timed(clock: Clock) -> None:
    long = "ffffbbbboooo|"
    _, before, after = times_of(f"fbo|;{long};{long}{long}{long}", "cpu", clock, frozenset({2, 4, 5}))
    assert before == {"step_s": 12, "steps": 1}
    assert after == {"forward_s": 12, "backward_s": 12, "optimizer_s": 12, "step_s": 36, "steps": 3}


@pytest.mark.parametrize("place", [0, 42])
def test_one_step_that_is_much_longer_changes_nothing_of_those_that_follow(clock: Clock, place: int) -> None:
    """As the first one, which compiles, and one in which the program stands still."""
    steps = ["fbo|"] * 300
    steps[place] = "f" * 100 + "bo|"
    story = "".join(step + ";" * (number % 6 == 0) for number, step in enumerate(steps, 1))
    timed = {*range(1, 7), *(number for number in range(1, 301) if number % 6 == 1)}
    found = list(times_of(story, "cpu", clock, frozenset(range(1, 301)) - frozenset(timed)))
    sums = {name: sum(one.get(name, 0.0) for one in found) for name in found[0]}
    expected = {"forward_s": 399, "backward_s": 300, "optimizer_s": 300, "step_s": 999, "steps": 300}
    assert sums == pytest.approx(expected)


@pytest.mark.parametrize("period", [2, 3, 4, 5, 8, 10])
def test_what_happens_with_a_period_is_in_the_times_as_often_as_it_happens(period: int, clock: Clock) -> None:
    timed = frozenset(step for step in range(1, 577) if is_one_in_eight(step))
    steps = ["fffffbo|" if number % period == period // 2 else "fbo|" for number in range(1, 577)]
    story = "".join(step + ";" * (number % 96 == 0) for number, step in enumerate(steps, 1))
    found = list(times_of(story, "cpu", clock, frozenset(range(1, 577)) - timed))
    assert len(timed) == 576 / 8
    assert sum(one.get("forward_s", 0.0) for one in found) == pytest.approx(story.count("f"), rel=0.05)
    assert sum(one.get("step_s", 0.0) for one in found) == len(story) - story.count("|") - story.count(";")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.usefixtures("gpu")
def test_a_wait_of_another_thread_is_none_of_the_program(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "clock_s", lambda: Event.now_s)
    monkeypatch.setattr(Event, "done_s", math.inf)
    made = Phases(torch.device(device))

    def wait() -> None:
        before = made.begin_wait()
        Event.now_s += 1
        if before is not None:
            made.end_wait(before)

    for phase, times in (
        (FORWARD, {"forward_s": 1.0, "step_s": 1.0}),
        (BACKWARD, {"comm_s": 1.0, "step_s": 1.0}),  # which on a GPU is a thread of autograd's
    ):
        with made.during(phase):
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
        made.end_step(2)
        assert made.take() == {**times, "steps": 1}


def test_whether_all_steps_are_timed_goes_by_the_time_of_the_last_ones_without_pauses(clock: Clock) -> None:
    made, were_timed = Phases(torch.device("cpu")), []
    for next_step, num_forwards in enumerate((7, 7, 9, 9, 7), 2):
        were_timed.append(made.is_timed)
        for phase in (PAUSED, *[FORWARD] * num_forwards):
            with made.during(phase):
                clock.time_s += 1
        made.end_step(next_step)
        made.take()
    assert were_timed == [True, True, False, False, True]


def test_times_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Phases(torch.device("cpu"))
    with made.during(FORWARD):
        pass
    made.end_step(2)
    assert made.take()["steps"] == 1
    assert made.take() == {}


def test_times_of_a_gpu_are_told_when_it_is_so_far(gpu: list[str]) -> None:
    made = Phases(torch.device("cuda", 0))

    def wait() -> None:
        before = made.begin_wait()
        Event.now_s += 1
        if before is not None:
            made.end_wait(before)

    def step() -> None:
        with made.during(FORWARD):
            Event.now_s += 1
            wait()
        gpu.append("beside")
        wait()  # that stream is not what computes
        gpu.pop()
        made.end_step(2)

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


def test_a_step_is_not_read_before_the_marks_of_other_streams_in_it(gpu: list[str]) -> None:
    """As of an evaluation in a stream that nothing waits for."""
    made = Phases(torch.device("cuda", 0))
    with made.during(FORWARD):
        Event.now_s += 1
    gpu.append("late")
    Event.now_s += 100
    with made.during(EVALUATING):
        pass
    gpu.pop()
    Event.now_s -= 100
    made.end_step(2)
    Event.done_s = 50.0  # the step has ended, and what is in the other stream has not begun
    assert made.take() == {}
    Event.done_s = 200.0
    assert made.take()["steps"] == 1

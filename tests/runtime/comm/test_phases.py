"""Where the time of a step goes, by made-up clocks."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
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


class Chosen(frozenset[int]):
    """The steps that are timed."""

    def adapt(self, **_: float) -> None:
        pass


def times_of(
    story: str, device: str, clock: Clock, untimed: frozenset[int] = frozenset()
) -> Iterator[dict[str, float]]:
    """Act it out, and yield what is told at each ; and at the end. A letter is a call of one second, ( ) is
    around what is in it, w a wait, . a second of the program, comma the end of a micro batch, | that of a
    step.
    """
    made = Phases(torch.device(device))
    made._timed_steps = Chosen(frozenset(range(1, 700)) - untimed)  # type: ignore[assignment]
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
            before = made.begin(COMM) if made.sees_waits else None
            clock.time_s += 1
            made.end(COMM, before)
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, gpu: list[str]) -> Clock:
    """That of the program, and of a GPU that is as far as it is."""
    made = Clock()
    monkeypatch.setattr(phases, "clock_s", made)
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
        ("fbo|.s(w).fbo|", {"forward": 2, "backward": 2, "optimizer": 2, "data": 2, "paused": 2}),
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
        expected |= {"step_s": sum(wanted.values()), "steps": num_steps}
    assert {name: value for name, value in found.items() if value} == expected


@pytest.mark.parametrize(
    ("story", "untimed", "wanted"),
    [
        # as long as the others, and as they are
        ("f(w)bo|f(w)bo|", {2}, {"forward": 2, "backward": 2, "optimizer": 2, "comm": 2}),
        # but for what is known: data, and what the program waits for between two steps
        (
            "fbo|..f|fbo|",
            {2},
            {"forward": 2 + 1 / 3, "backward": 2 + 1 / 3, "optimizer": 2 + 1 / 3, "data": 2},
        ),
        ("fbo|...fbo|", {2}, {"forward": 2, "backward": 2, "optimizer": 2, "data": 3}),
        ("fbo|" + "." * 50 + "fbo|", {2}, {"forward": 2, "backward": 2, "optimizer": 2, "data": 50}),
        ("fbo|.w.fb(w)|", {2}, {"forward": 2, "backward": 2, "optimizer": 2, "data": 2, "comm": 1}),
        (
            "fbo|s(w).w.fb(w)|",
            {2},
            {"forward": 2, "backward": 2, "optimizer": 2, "data": 2, "comm": 1, "paused": 2},
        ),
        ("f(w)o|.w.f(w)o|", {2}, {"forward": 2, "optimizer": 2, "data": 2, "comm": 3}),
        ("fb,.fbo|fb,..fbo|", {2}, {"forward": 4, "backward": 4, "optimizer": 2, "data": 3}),
        ("fb,.fbo|fb,.w.fbo|", {2}, {"forward": 4, "backward": 4, "optimizer": 2, "data": 3, "comm": 1}),
        # and waits of the next timed one are seen again
        ("f(w)o|f(w)o|f(ww)o|", {2}, {"forward": 3, "optimizer": 3, "comm": 4}),
        # data that come without the end of a micro batch, and inside of a pipeline's call, are estimated
        ("fb..fbo|fb..fbo|", {2}, {"forward": 4, "backward": 4, "optimizer": 2, "data": 4}),
        (
            "d(w)f(fb)o|.d(w)f(fb)o|",
            {2},
            {"forward": 4, "backward": 2, "optimizer": 2, "data": 3, "comm": 2},
        ),
        # engine.module runs forward: what is before the backward is no data
        ("fbo|..bo|..bo|", {3}, {"forward": 5, "backward": 3, "optimizer": 3}),
        ("f(w)b|..b(w)|..b(w)|", {3}, {"forward": 5, "backward": 3, "comm": 3}),
        ("fbo|fbo|fbo|fbo|", {2, 3, 4}, {"forward": 4, "backward": 4, "optimizer": 4}),
        # two that are timed differ: an untimed one is as that of its length
        ("fo|fbbbb|ffb|", {3}, {"forward": 3.5, "backward": 4, "optimizer": 2.5}),
        ("fo|fbbbb|ffffb|", {3}, {"forward": 3, "backward": 8, "optimizer": 1}),
        # none was about as long: for what is not known
        ("fbo|.fffffffffbo|", {2}, {"forward": 1, "backward": 1, "optimizer": 1, "data": 1, "?": 11}),
        ("ffffffffbo|f|", {2}, {"forward": 8, "backward": 1, "optimizer": 1, "?": 1}),
        # pauses are known
        ("fbo|s(w).ffo|", {2}, {"forward": 2, "backward": 2, "optimizer": 2, "data": 1, "paused": 2}),
        (
            "fbo|.e.e(w)..f|",
            {2},
            {"forward": 1 + 1 / 3, "backward": 1 + 1 / 3, "optimizer": 1 + 1 / 3, "data": 1, "paused": 6},
        ),
        # a teacher inside of a step
        (
            "fbo|.f.e(w)bw|",
            {2},
            {"forward": 2 + 1 / 3, "backward": 2 + 1 / 3, "optimizer": 2 + 1 / 3, "data": 1, "paused": 2},
        ),
        (
            "fbo|e.s.f|fbo|",
            {2},
            {"forward": 2 + 1 / 3, "backward": 2 + 1 / 3, "optimizer": 2 + 1 / 3, "paused": 4},
        ),
        ("fbo|bes(e)b.|", {2}, {"forward": 2, "backward": 2, "optimizer": 2, "paused": 3}),
        # micro batches, and a call that a step ends in
        ("fb,fbo|fb.,fb|", {2}, {"forward": 4, "backward": 4, "optimizer": 2}),
        ("f(b|)..fb|", {2}, {"forward": 2, "backward": 2, "data": 2}),
        ("f(b|)..fb|", {3}, {"forward": 2, "backward": 2, "data": 2}),
        ("fb|f(b|)fb|", {2}, {"forward": 3, "backward": 3}),
    ],
)
def test_an_untimed_step_is_as_the_timed_ones(
    story: str, untimed: set[int], wanted: dict[str, float], place: str, clock: Clock
) -> None:
    (found,) = times_of(story, place, clock, frozenset(untimed))
    expected = {f"{name}_s": seconds for name, seconds in wanted.items() if name != "?"}
    expected |= {"step_s": sum(wanted.values()), "steps": story.count("|")}
    assert {name: value for name, value in found.items() if value} == pytest.approx(expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_marks_of_steps_that_nobody_asks_for_are_few(
    device: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "_MOST_MARKS", 20)
    made = Phases(torch.device(device))
    made._timed_steps = Chosen()  # type: ignore[assignment]
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
    made._timed_steps = Chosen()  # type: ignore[assignment]
    for number, stream in enumerate(("first", "second", "third")):
        gpu.append(stream)
        with made.during(FORWARD):
            pass
        gpu.append(f"end of {stream}")
        made.end_step(number + 2)
    assert marked_in[2:] == ["end of first", "second", "end of second", "third", "end of third"]


def test_where_no_step_was_timed_they_are_as_those_before(clock: Clock) -> None:
    first, second, third = times_of("fbbo|;ffo|.fo|;.........fbo|", "cpu", clock, frozenset({2, 3, 4}))
    assert first == {"forward_s": 1, "backward_s": 2, "optimizer_s": 1, "step_s": 4, "steps": 1}
    assert second == pytest.approx(
        {"forward_s": 1.25, "backward_s": 2.5, "optimizer_s": 1.25, "data_s": 1, "step_s": 6, "steps": 2}
    )
    assert third == pytest.approx(
        {"forward_s": 0.75, "backward_s": 1.5, "optimizer_s": 0.75, "data_s": 9, "step_s": 12, "steps": 1}
    )


def test_of_steps_that_become_long_it_is_known_when_one_was_timed(clock: Clock) -> None:
    long = "ffffbbbboooo|"
    _, before, after = times_of(f"fbo|;{long};{long}{long}{long}", "cpu", clock, frozenset({2, 4, 5}))
    assert before == {"step_s": 12, "steps": 1}
    assert after == pytest.approx(
        {"forward_s": 12, "backward_s": 12, "optimizer_s": 12, "step_s": 36, "steps": 3}
    )


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


def test_what_is_seldom_timed_is_as_often_in_the_times_as_it_happens(clock: Clock) -> None:
    """Each 8th step has a long forward; one in six is timed, and one line is told for six steps."""
    usual, slow = "fbo|", "f" * 13 + "bo|"
    steps = [slow if number % 8 == 5 else usual for number in range(1, 601)]
    story = "".join(step + ";" * (number % 6 == 0) for number, step in enumerate(steps, 1))
    timed = {1, *(number for number in range(1, 601) if number * 7 % 48 < 8)}
    found = list(times_of(story, "cpu", clock, frozenset(range(1, 601)) - frozenset(timed)))
    forward_s = sum(one.get("forward_s", 0.0) for one in found)
    assert forward_s == pytest.approx(600 + 75 * 12, rel=0.05)
    assert sum(one["step_s"] for one in found if one) == 600 * 3 + 75 * 12


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
        made.end_step(2)
        assert made.take() == {**times, "steps": 1}


def test_how_many_steps_are_timed_goes_by_their_time_without_pauses_and_by_their_marks(clock: Clock) -> None:
    made, told = Phases(torch.device("cpu")), []

    class Timed(Chosen):
        def adapt(self, **given: float) -> None:
            told.append(given)

    made._timed_steps = Timed({1})  # type: ignore[assignment]
    for number, phase in enumerate((FORWARD, PAUSED, FORWARD)):
        with made.during(phase):
            clock.time_s += 5
        clock.time_s += 1
        if phase == FORWARD:
            made.end_step(number + 2)
    assert made.take()["steps"] == 2
    assert told == [
        {"num_steps": 2, "seconds": 6 + 1 + 6, "marks": 2}
    ]  # the end of the forward, and of the step


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

"""The stream of events: what is made of what hosts say, and what those get who listen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dslaunch.launcher.inputs.line_prefix import Origin
from dslaunch.launcher.telemetry import thinning
from dslaunch.launcher.telemetry.telemetry import Telemetry
from dslaunch.launcher.telemetry.thinning import Thinned, together
from dslaunch.launcher.wire.frames import Metrics, Told


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.is_closed = False

    def take(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.is_closed = True

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [one for one in self.events if one["event"] == kind]


ORIGINS = (Origin("a", 0, 0, 0), Origin("b", 1, 1, 0))


def test_who_comes_late_hears_first_what_it_is_about() -> None:
    telemetry, kept = Telemetry(), Kept()
    telemetry.begin({"name": "train"}, interval_s=1.0)
    telemetry.begin_attempt(ORIGINS)
    telemetry.take_told(Told(0, "config", '{"zero": 3}'))
    telemetry.record("note", text="gone")
    telemetry.begin_attempt(ORIGINS)
    telemetry.take_told(Told(1, "config", '{"zero": 2}'))
    telemetry.add(kept)
    assert [(one["event"], one.get("attempt"), one.get("config")) for one in kept.events] == [
        ("job", None, None),
        ("attempt", 1, None),
        ("config", None, {"zero": 2}),
    ]


def test_numbers_of_all_hosts_are_one_event_an_interval() -> None:
    telemetry, kept = Telemetry(), Kept()
    telemetry.begin({}, interval_s=2.0)
    telemetry.add(kept)
    telemetry.look(0.0)
    telemetry.take_metrics("a", Metrics(0.0, {"0": {"step": 1, "steps": 1, "loss": 2.0}}, {"cpu": 0.5}))
    telemetry.look(100.0)
    telemetry.take_metrics(
        "b", Metrics(0.0, {"1": {"step": 1, "steps": 1}}, {"cpu": 0.25, "links": {"to": {}}})
    )
    telemetry.take_metrics("a", Metrics(0.0, {"0": {"step": 2, "steps": 1}}, {"cpu": 0.75}))
    telemetry.heard_output(1, 3)
    telemetry.heard_output(1, 2)
    telemetry.look(100.5)
    assert kept.of("metrics") == [], "the other host has a moment"
    telemetry.look(100.7)
    (event,) = kept.of("metrics")
    assert event["ranks"] == {"0": {"step": 2, "steps": 2, "loss": 2.0}, "1": {"step": 1, "steps": 1}}
    assert event["hosts"] == {"a": {"cpu": 0.75}, "b": {"cpu": 0.25}}
    assert event["lines"] == {"1": 5}
    telemetry.heard_output(0, 1)
    telemetry.look(102.6)
    assert len(kept.of("metrics")) == 1
    telemetry.look(102.8)
    assert kept.of("metrics")[1]["lines"] == {"0": 1}
    telemetry.look(110.0)
    assert len(kept.of("metrics")) == 2, "nothing was told"


def test_folded_numbers_keep_their_host_apart() -> None:
    telemetry, kept = Telemetry(), Kept()
    telemetry.add(kept)
    telemetry.take_metrics("a", Metrics(0.0, {"*": {"loss": [1.0, 2.0, 3.0, 4, 5]}}, {}))
    telemetry.take_metrics("b", Metrics(0.0, {"*": {"loss": [2.0, 2.0, 2.0, 8, 8]}}, {}))
    telemetry.flush()
    assert kept.of("metrics")[0]["ranks"] == {
        "a *": {"loss": [1.0, 2.0, 3.0, 4, 5]},
        "b *": {"loss": [2.0, 2.0, 2.0, 8, 8]},
    }


@pytest.mark.parametrize("text", ["", "{", '"' + "x" * 50])
def test_what_a_worker_tells_badly_is_left_out(text: str) -> None:
    telemetry, kept = Telemetry(), Kept()
    telemetry.add(kept)
    telemetry.take_told(Told(0, "config", text))
    telemetry.take_told(Told(0, "hang", text))
    telemetry.take_told(Told(0, "end", "{}"))
    assert kept.events == []


def test_a_hang_is_told_in_the_words_of_the_watchdog() -> None:
    telemetry, kept = Telemetry(), Kept()
    telemetry.add(kept)
    telemetry.take_told(Told(1, "hang", '"it hangs:\\n  rank 0"'))
    assert [(one["rank"], one["report"]) for one in kept.of("hang")] == [(1, "it hangs:\n  rank 0")]


def test_a_sink_that_fails_gets_no_more_and_the_others_do() -> None:
    class Broken(Kept):
        def take(self, event: Mapping[str, Any]) -> None:
            super().take(event)
            if event["event"] == "note":
                raise KeyError("no such thing")

    telemetry, broken, kept, problems = Telemetry(), Broken(), Kept(), list[str]()
    telemetry.on_problem = problems.append
    for sink in (broken, kept):
        telemetry.add(sink)
    for number in range(3):
        telemetry.record("note", number=number)
    assert problems == ["the job goes on without its Broken, which failed: KeyError: 'no such thing'"]
    assert [one["number"] for one in broken.events] == [0]
    assert [one["number"] for one in kept.events] == [0, 1, 2]


def test_numbers_become_rarer_and_nothing_of_them_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(thinning.time, "monotonic", lambda: now[0])
    kept = Kept()
    thinned = Thinned(kept, rarer=10)
    for second in range(1000):
        now[0] = float(second)
        rank = {"step": second, "steps": 1}
        thinned.take({"event": "metrics", "at": second, "ranks": {"0": rank}, "hosts": {}, "lines": {"0": 2}})
        if second == 500:
            thinned.take({"event": "note"})
    now[0] = 1000.0
    thinned.take({"event": "end"})
    thinned.close()
    metrics = kept.of("metrics")
    assert 20 < len(metrics) < 60
    assert sum(one["ranks"]["0"]["steps"] for one in metrics) == 1000
    assert sum(one["lines"]["0"] for one in metrics) == 2000
    assert metrics[-1]["ranks"]["0"]["step"] == 999
    assert kept.events[-1] == {"event": "end"}
    assert kept.is_closed


def test_two_events_of_folded_numbers_are_one() -> None:
    first = {
        "ranks": {"a *": {"step_s": [1.0, 2.0, 3.0, 0, 1], "loss": [1, 2, 3, 0, 1]}},
        "hosts": {},
        "lines": {},
    }
    later = {
        "ranks": {"a *": {"step_s": [1.0, 1.5, 2.0, 2, 3], "loss": [0, 1, 2, 2, 3]}},
        "hosts": {},
        "lines": {},
    }
    assert together(first, later)["ranks"] == {
        "a *": {"step_s": [2.0, 3.5, 5.0, 2, 3], "loss": [0, 1, 2, 2, 3]}
    }
    assert first["ranks"]["a *"]["loss"] == [1, 2, 3, 0, 1], "what was passed on is not changed"

"""Successive halving: what runs next, what is measured of it, and the rows."""

from __future__ import annotations

from pathlib import Path

from dslaunch.launcher.fit.tuning import LATENCY, Halving, Outcome, TrialPlace, Tuning, measured

from .test_suggestion import tried

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("a", "b", "c")


def known(*rows: tuple[str, int, float | None]) -> dict[TrialPlace, Outcome]:
    return {
        TrialPlace(name, number): Outcome(
            step_s=step_s, num_samples=8, num_steps=5, why_out="" if step_s else "out of memory"
        )
        for name, number, step_s in rows
    }


def test_the_better_half_runs_twice_as_long_until_one_is_left() -> None:
    halving = Halving(NAMES, 5)
    ended: dict[TrialPlace, Outcome] = {}
    seconds = {"a": 3.0, "b": 1.0, "c": 2.0}
    ran = []
    while (due := halving.next_trial(ended)) is not None:
        place, num_steps = due
        ran.append((*place, num_steps))
        ended |= known(
            (place.name, place.number, seconds[place.name] + place.number * (place.name == "b") * 2)
        )
    assert ran == [("a", 0, 5), ("b", 0, 5), ("c", 0, 5), ("b", 1, 10), ("c", 1, 10)]
    assert halving.order(ended) == ["c", "b", "a"]  # the second round has shown that b is slower


def test_what_fails_is_out() -> None:
    halving = Halving(NAMES, 5)
    first = known(("a", 0, None), ("b", 0, 2.0), ("c", 0, 1.0))
    assert halving.next_trial(first) is None  # the better half of two is one
    assert halving.order(first) == ["c", "b"]
    second = known(("a", 0, 3.0), ("b", 0, 2.0), ("c", 0, 1.0), ("b", 1, None), ("c", 1, None))
    assert halving.next_trial(second) is None
    assert halving.order(second) == ["a"]
    assert Halving(("a",), 5).next_trial(known(("a", 0, None))) is None


def test_the_metric_says_what_is_better() -> None:
    ended = {
        TrialPlace("a", 0): Outcome(step_s=1.0, num_samples=8, num_steps=5),
        TrialPlace("b", 0): Outcome(step_s=1.5, num_samples=16, num_steps=5),
    }
    assert Halving(("a", "b"), 5).order(ended) == ["b", "a"]
    assert Halving(("a", "b"), 5, LATENCY).order(ended) == ["a", "b"]


def test_a_step_is_as_long_as_on_the_slowest_rank() -> None:
    told = {
        0: {"steps_s": [1.0, 9.0, 2.0], "samples": 8, "kept_files": ""},
        1: {"steps_s": [3.0, 3.0, 4.0], "samples": 8, "kept_files": "no overlay"},
    }
    found = measured(told, num_ranks=2)
    assert found == Outcome(step_s=3.0, num_samples=8, num_steps=3, kept_files="no overlay")
    assert measured(told, num_ranks=3) is None
    assert measured({0: {"steps_s": [], "samples": 0, "kept_files": ""}}, num_ranks=1) is None


def test_rows_have_what_was_predicted_and_measured() -> None:
    candidates = (tried(1, activations=8), tried(2, activations=8, seconds=2), tried(3, activations=9))
    names = tuple(one.candidate.text for one in candidates)
    ended = known((names[0], 0, None), (names[1], 0, 0.5), (names[2], 0, 0.6))
    found = Tuning(tried=candidates, halving=Halving(names, 5), known=ended, config={"fp16": {}})
    text = "\n".join(found.lines()) + "\n"
    assert text == (GOLDEN / "plan-tune.txt").read_text(), f"\n{text}"
    assert found.best is candidates[1]
    config = found.best_config()
    assert config is not None
    assert (config["zero_optimization"], config["fp16"]) == ({"stage": 2}, {})
    assert [one["is_best"] for one in found.as_data()] == [False, True, False]

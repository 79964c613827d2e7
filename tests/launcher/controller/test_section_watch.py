"""Sections of a running job: their limits, given or learned, and what is said of one that stands still."""

from __future__ import annotations

import pytest

from dslaunch.launcher.controller.section_watch import LongStandstill, SectionWatch
from dslaunch.launcher.job.section_limits import SectionLimits
from dslaunch.launcher.options.hang_limit import GivenLimits, read_limits
from dslaunch.launcher.wire.frames import Metrics

LEARNED = GivenLimits({}, learns=True)


class Run:
    """A job of two ranks on one host, whose clock is told."""

    def __init__(self, limits: SectionLimits) -> None:
        self.limits, self.now = limits, 100.0
        self.watch = SectionWatch(limits, (0, 1))
        self.watch.begin(self.now)

    def told(self, *rows: dict[str, object], after: float = 1.0) -> None:
        """The ranks' next lines, so many seconds later."""
        self.now += after
        ranks = {str(rank): row for rank, row in enumerate(rows) if row}
        self.watch.take("h", Metrics(self.now, ranks, {}), self.now)

    def train(self, num_steps: int, *, step_s: float = 1.0, first: int = 1) -> None:
        for step in range(first, first + num_steps):
            self.told({"step": step}, {"step": step}, after=step_s)

    def still(self, seconds: float) -> str:
        """What is said after so many seconds more; empty if nothing is."""
        self.now += seconds
        found = self.watch.look(self.now)
        return "" if found is None else found.text


def test_a_step_may_take_ten_times_the_longest_once_ten_are_known() -> None:
    run = Run(SectionLimits(LEARNED))
    run.train(5, step_s=80.0)
    run.told({"waiting": 2.0}, {})
    assert run.still(1e5) == "", "nothing is known yet"
    run.now -= 1e5 + 1
    run.train(10, step_s=80.0, first=6)
    run.told({"waiting": 2.0}, {})
    assert run.still(798) == ""
    assert run.still(2) == (
        "nothing has moved for 801 s in the section 'step', whose limit is 800 s (10 times the longest of 14 "
        "steps, 80 s; --hang_limit step=S allows more or less); the others wait for rank 1"
    )
    assert run.still(100) == "", "it is said once"


@pytest.mark.parametrize("known", [None, 0, 2])
def test_a_rank_that_is_stopped_is_the_cause_of_a_standstill(known: int | None) -> None:
    """In a start no rank is known to wait, and two ranks may be the ones that others wait for."""
    found = LongStandstill("nothing has moved", known)
    assert found.with_stopped({2, 3}).rank == 2
    assert found.with_stopped(set()) == found


def test_what_is_learned_ends_no_program_that_does_something_else() -> None:
    run = Run(SectionLimits(LEARNED))
    run.train(20, step_s=0.1)
    assert run.still(1e5) == "", "no rank waits for another one"


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    run = Run(SectionLimits(read_limits("step=5")))
    run.train(1)
    run.told({"waiting": 2.0}, {})
    run.told({"waiting": 4.5}, {}, after=2.5)
    run.now += 2
    found = run.watch.look(run.now)
    assert found is not None
    assert found.rank == 1
    assert "whose limit is 5 s (as --hang_limit says); the others wait for rank 1" in found.text


@pytest.mark.parametrize(
    ("waits", "text"), [((3.0, 4.0), "all ranks wait for each other"), ((0, 0), "no rank is known to wait")]
)
def test_no_rank_is_named_where_all_wait_or_none(waits: tuple[float, float], text: str) -> None:
    run = Run(SectionLimits(read_limits("step=5")))
    run.train(1)
    run.told({"waiting": waits[0]}, {"waiting": waits[1]})
    assert text in run.still(6)


def test_a_long_save_is_no_hang_and_the_next_one_is_measured_by_it() -> None:
    run = Run(SectionLimits(read_limits("step=5")))
    run.train(3)
    run.told({"state": "saving"}, {"state": "saving"}, after=0.1)
    assert run.still(500) == ""
    run.told({"step": 4}, {"step": 4}, after=0)
    assert run.limits.all["save"] == 5000
    assert run.limits.limit_of("save").is_learned  # type: ignore[union-attr] # it is there
    assert run.limits.limit_of("load") is None
    run.train(1, first=5)
    assert "'step'" in run.still(6)


def test_an_evaluation_moves_as_long_as_forwards_are_told() -> None:
    run = Run(SectionLimits(read_limits("step=5,evaluation=5")))
    run.train(3)
    for _ in range(20):
        run.told({"state": "evaluating"}, {"state": "evaluating"}, after=2)
        assert run.still(0) == ""
    for _ in range(3):
        run.told({"state": "evaluating", "waiting": 2.0}, {}, after=2)
    assert "'evaluation'" in run.still(0)


def test_of_many_ranks_the_folded_numbers_are_enough() -> None:
    run = Run(SectionLimits(read_limits("step=5,save=50")))
    run.watch.take(
        "h", Metrics(0.0, {"*": {"step": [3, 3, 3, 0, 99], "pause": [0, 0, 0, 0, 99]}}, {}), run.now
    )
    row = {"waiting": [0, 1.9, 2, 70, 3], "pause": [0, 0, 0, 0, 99]}
    run.watch.take("h", Metrics(0.0, {"*": row}, {}), run.now + 1)
    found = run.watch.look(run.now + 6)
    assert found is not None
    assert found.rank == 70
    saving = Run(SectionLimits(read_limits("step=5,save=50")))
    saving.train(1)
    saving.watch.take("h", Metrics(0.0, {"*": {"pause": [3, 3, 3, 0, 99]}}, {}), saving.now)
    assert saving.still(40) == ""
    assert "'save'" in saving.still(20)


def test_what_was_learned_holds_from_the_first_step_of_the_next_job() -> None:
    run = Run(SectionLimits(LEARNED))
    run.train(20, step_s=70.0)
    later = Run(SectionLimits(LEARNED, run.limits.learned))
    later.train(1)
    later.told({"waiting": 2.0}, {})
    assert later.still(698) == ""
    assert "10 times the longest so far, 70 s" in later.still(2)


def test_short_steps_have_ten_minutes() -> None:
    run = Run(SectionLimits(LEARNED))
    run.train(20, step_s=0.1)
    run.told({"waiting": 2.0}, {})
    assert run.still(598) == ""
    assert "the shortest that is learned; the longest of 19 steps took 0.1 s" in run.still(2)


@pytest.mark.parametrize(
    "text", ["", "60", "step", "step=", "step=-1", "step=nan", "steps=3", "step=1,,save=2"]
)
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give off, learned, or seconds for some of start, load, step, save"):
        read_limits(text)


def test_a_section_has_one_limit() -> None:
    with pytest.raises(ValueError, match="has two limits of step; leave out one of them"):
        read_limits("step=60,save=9,step=70")


def test_off_is_no_limit_at_all() -> None:
    assert read_limits("off") == GivenLimits({}, learns=False)
    assert SectionLimits(read_limits("step=0")).limit_of("step") is None

"""Who is named as the one that others wait for, by the times that ranks tell; and who is not."""

from __future__ import annotations

import random

import pytest

from dslaunch.launcher.telemetry.straggler_watch import WINDOW_S

from .job_numbers import FakeJob, Step, hosts, named

PLAIN = Step()
SLOW_FORWARD = PLAIN._replace(forward_s=PLAIN.forward_s + 0.03)
SLOW_DATA = PLAIN._replace(data_s=0.035)
LONG = 60.0


def test_ranks_that_are_alike_have_no_straggler() -> None:
    job = FakeJob(lambda rank, at: PLAIN, hosts=hosts(2, 4), noise=0.3)
    assert job.run(200.0) == []


def test_one_that_computes_longer_is_named_with_the_phase_and_what_to_do() -> None:
    job = FakeJob(lambda rank, at: SLOW_FORWARD if rank == 5 else PLAIN, hosts=hosts(2, 4), noise=0.0)
    assert job.run(WINDOW_S / 2) == [], "it is no straggler yet"
    (one,) = job.run(LONG)
    assert one[:3] == (5, "b", "compute")
    assert one.share == pytest.approx(0.03 / 0.141, rel=0.01)
    assert one.text == (
        "rank 5 on b holds up the others by 30 ms in each step of 141 ms, 21 %: it computes for 130 ms a "
        "step, others 100 ms, most of the difference in forward; look at the load, the clock and the "
        "temperature of its processors"
    )
    assert job.run(2 * LONG) == [], "it is said once"


def test_one_that_waits_for_its_data_is_named_with_that() -> None:
    job = FakeJob(lambda rank, at: SLOW_DATA if rank == 0 else PLAIN, hosts=hosts(2, 2), noise=0.0)
    (one,) = job.run(LONG)
    assert one[:3] == (0, "a", "data")
    assert (
        "getting data, or what else it does between steps, takes 35 ms a step, others 2 ms; look at"
        in one.text
    )


@pytest.mark.parametrize(("cause", "step"), [("compute", SLOW_FORWARD), ("data", SLOW_DATA)])
def test_two_ranks_are_enough_to_compare(cause: str, step: Step) -> None:
    job = FakeJob(lambda rank, at: step if rank == 1 else PLAIN, hosts={"a": [0, 1]})
    assert named(job.run(LONG)) == [(1, "a", cause)]


def test_what_tells_no_phases_is_judged_by_its_own_time() -> None:
    job = FakeJob(lambda rank, at: SLOW_FORWARD if rank == 1 else PLAIN, hosts=hosts(3, 1), has_phases=False)
    assert named(job.run(LONG)) == [(1, "b", "compute")]
    job = FakeJob(lambda rank, at: SLOW_DATA if rank == 1 else PLAIN, hosts=hosts(3, 1), has_phases=False)
    assert named(job.run(LONG)) == [(1, "b", "data")]


def test_less_than_a_tenth_of_the_step_is_nothing() -> None:
    a_little = PLAIN._replace(forward_s=PLAIN.forward_s + 0.008)
    job = FakeJob(lambda rank, at: a_little if rank == 1 else PLAIN, hosts=hosts(2, 2))
    assert job.run(LONG) == []


@pytest.mark.parametrize(
    "saving",
    [
        PLAIN._replace(other_s=1.0, state="saving"),
        PLAIN._replace(other_s=1.0),
        PLAIN._replace(paused_s=1.0),
    ],
)
def test_a_rank_that_saves_is_no_straggler(saving: Step) -> None:
    """As rank 0 does every 20 steps, and others wait; with and without a word of what it does."""
    job = FakeJob(
        lambda rank, at: saving if rank == 0 and job.num_steps % 20 == 0 else PLAIN, hosts=hosts(2, 2)
    )
    assert job.run(2 * LONG) == []


def test_one_long_pause_is_nothing_whatever_it_is_for() -> None:
    paused = PLAIN._replace(data_s=30.0)
    for pause in (SLOW_FORWARD._replace(forward_s=30.0), paused):
        taken: list[float] = []

        def work(rank: int, at: float, pause: Step = pause, taken: list[float] = taken) -> Step:
            if rank == 1 and at > 50 and not taken:
                taken.append(at)
                return pause
            return PLAIN

        assert FakeJob(work, hosts=hosts(2, 2)).run(200.0) == []
        assert taken


def test_a_rank_that_is_slow_now_and_then_is_found() -> None:
    """Each tenth batch takes a second, as of a loader with too few workers."""
    job = FakeJob(
        lambda rank, at: PLAIN._replace(data_s=1.0) if rank == 2 and job.num_steps % 10 == 0 else PLAIN,
        hosts=hosts(2, 2),
    )
    assert named(job.run(LONG)) == [(2, "b", "data")]


def stage_of(rank: int) -> str:
    return f"stage {rank // 2} of 4, dp {rank % 2}"


def test_stages_that_differ_by_design_are_not_compared() -> None:
    def work(rank: int, at: float) -> Step:
        return PLAIN._replace(forward_s=0.01 + 0.03 * (rank // 2))

    assert FakeJob(work, hosts=hosts(4, 2), place_of=stage_of).run(LONG) == []
    assert named(FakeJob(work, hosts=hosts(4, 2)).run(LONG)), "without their places they would be"
    alone = FakeJob(work, hosts=hosts(4, 1), place_of=lambda rank: f"stage {rank} of 4")
    assert alone.run(LONG) == [], "a stage of one rank has none to compare with"


def test_a_slow_rank_of_a_stage_is_named_with_its_place() -> None:
    def work(rank: int, at: float) -> Step:
        longer = 0.05 if rank == 4 else 0.0
        return PLAIN._replace(forward_s=0.01 + 0.01 * (rank // 2), backward_s=PLAIN.backward_s + longer)

    (one,) = FakeJob(work, hosts=hosts(4, 2), place_of=stage_of).run(LONG)
    assert one[:3] == (4, "c", "compute")
    assert "rank 4 on c (stage 2 of 4, dp 0) holds up the others" in one.text
    assert "most of the difference in backward" in one.text


def test_where_a_rank_is_told_by_itself_counts_before_what_the_plan_says() -> None:
    places = {"a": {"0": "stage 0 of 2", "1": "stage 1 of 2"}}
    job = FakeJob(
        lambda rank, at: SLOW_FORWARD if rank == 1 else PLAIN,
        hosts={"a": [0, 1]},
    )
    assert job.run(LONG, host_numbers=lambda host, at: {"places": places[host]} if at < 2 else {}) == []


def test_two_stragglers_are_both_named() -> None:
    job = FakeJob(
        lambda rank, at: {1: SLOW_FORWARD, 6: SLOW_DATA}.get(rank, PLAIN), hosts=hosts(2, 4), noise=0.02
    )
    assert sorted(named(job.run(LONG))) == [(1, "a", "compute"), (6, "b", "data")]


def test_ranks_of_one_host_are_one_line() -> None:
    job = FakeJob(lambda rank, at: SLOW_FORWARD if rank >= 6 else PLAIN, hosts=hosts(4, 2), noise=0.01)
    news = job.run(LONG)
    assert [one.host for one in news] == ["d"]
    assert " on d and 1 other rank there hold up the others by 3" in news[0].text


def test_it_is_said_again_after_it_was_well_and_less_and_less_often() -> None:
    job = FakeJob(
        lambda rank, at: SLOW_FORWARD if rank == 1 and at % 100 < 50 else PLAIN, hosts=hosts(2, 2), noise=0.02
    )
    news = job.run(100.0)
    assert [(one.rank, one.cause, one.is_over) for one in news] == [
        (1, "compute", False),
        (1, "compute", True),
    ]
    news += job.run(900.0)
    assert len(named(news)) == 10, "an event each time"
    assert 3 <= sum(one.is_said for one in news if not one.is_over) <= 6


def test_another_cause_is_news_and_turning_to_and_fro_is_not() -> None:
    def work(rank: int, at: float) -> Step:
        if rank != 1 or at > 500:
            return PLAIN
        return SLOW_DATA if at % 100 > 50 else SLOW_FORWARD

    job = FakeJob(work, hosts=hosts(2, 2), noise=0.02)
    assert named(job.run(500.0)) == [(1, "a", "compute"), (1, "a", "data")]


def test_steps_longer_than_the_window_are_seen_too() -> None:
    def work(rank: int, at: float) -> Step:
        return Step(forward_s=20.0 + 10.0 * (rank == 1), backward_s=20.0)

    job = FakeJob(work, hosts=hosts(2, 1), noise=0.02)
    assert job.run(3 * 50.0) == []
    assert named(job.run(8 * 50.0)) == [(1, "b", "compute")]


def test_ranks_that_do_not_wait_for_each_other_are_no_stragglers() -> None:
    """Each goes at its own pace; nobody waits."""
    job = FakeJob(lambda rank, at: PLAIN, hosts=hosts(2, 1))
    from dslaunch.launcher.wire.frames import Metrics

    for second in range(60):
        for rank, host in ((0, "a"), (1, "b")):
            step_s = 0.1 + 0.1 * rank
            row = {"steps": 1 / step_s, "step_s": 1.0, "comm_s": 0.0, "data_s": 0.0}
            job.watch.take(host, Metrics(0.0, {str(rank): row}, {}), float(second))
        assert job.watch.look(float(second)) == []


@pytest.mark.parametrize("num_hosts", [1, 9])
@pytest.mark.parametrize("cause", ["compute", "data", ""])
def test_of_many_ranks_the_slowest_of_each_host_is_known(num_hosts: int, cause: str) -> None:
    slow = {"compute": SLOW_FORWARD, "data": SLOW_DATA, "": PLAIN}[cause]
    job = FakeJob(
        lambda rank, at: slow if rank == 5 else PLAIN,
        hosts=hosts(num_hosts, 72 // num_hosts),
        is_folding=True,
    )
    assert named(job.run(LONG)) == ([(5, "a", cause)] if cause else [])


def test_numbers_that_make_no_sense_are_left_out() -> None:
    job = FakeJob(lambda rank, at: SLOW_FORWARD if rank == 1 else PLAIN, hosts=hosts(3, 1))
    from dslaunch.launcher.wire.frames import Metrics

    bad = ({"steps": 1, "step_s": "nan", "comm_s": 0.1}, {"steps": 0, "step_s": 1.0}, {"comm_s": -1.0})
    for second in range(40):
        for row in bad:
            job.watch.take("a", Metrics(0.0, {"0": row, "*": row}, {"links": 3, "places": []}), second)
        job.watch.take("a", Metrics(0.0, {"*": {"own_s": [1, 2], "step_s": ["nan"] * 5}}, {}), second)
    assert job.watch.look(40.0) == []
    assert named(job.run(LONG)) == [(1, "b", "compute")]


@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4, 20))]
)
def test_noise_of_a_busy_machine_names_nobody(seed: int) -> None:
    """Spikes of all ranks, as long as five steps."""
    spikes = random.Random(seed)

    def work(rank: int, at: float) -> Step:
        return PLAIN._replace(backward_s=0.6) if spikes.random() < 0.01 else PLAIN

    assert FakeJob(work, hosts=hosts(2, 2), noise=0.3, seed=seed).run(300.0) == []

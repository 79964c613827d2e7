"""The way from a fault to the next step, and the time of a job by what it was spent on."""

from __future__ import annotations

from typing import Any

import pytest

from dslaunch.launcher.run_state.goodput import share_of
from dslaunch.launcher.run_state.recovery import Recovery
from dslaunch.launcher.run_state.run_state import MAX_ATTEMPTS, RunState

AT = 1000.0
STEP_S, SAVE_S, EVERY = 0.5, 1.0, 10  # a checkpoint after every tenth step


class _Job:
    """Events of a job with one rank, which reports every two steps, and the truth about its time."""

    def __init__(self) -> None:
        self.state = RunState()
        self.now = AT
        self.attempt = -1
        self.step = 0
        self.take("job", name="train")

    def take(self, event: str, at: float | None = None, **keys: Any) -> None:
        self.state.take({"at": self.now if at is None else at, "event": event, **keys})

    def start(self, begin_s: float, *, resumed: int) -> None:
        """Start an attempt whose first step begins after `begin_s`."""
        self.attempt, self.step = self.attempt + 1, resumed
        self.take("attempt", attempt=self.attempt, workers=[["a", 0, 0, 0]])
        began, self.now = self.now, self.now + begin_s
        for phase, share in (("connected", 0.25), ("started", 0.5), ("imported", 0.75), ("loaded", 1.0)):
            self.take("phase", at=began + share * begin_s, attempt=self.attempt, phase=phase)

    def train(self, until: int) -> None:
        is_first = True
        while self.step < until:
            num = 1 if is_first else min(2, until - self.step)
            saves = (self.step + num - 1) // EVERY - (self.step - 1) // EVERY if not is_first else 0
            self.step += num
            spent_s = num * STEP_S + saves * SAVE_S
            self.now += spent_s
            if is_first:
                self.take("phase", attempt=self.attempt, phase="first step")
            row = {"step": self.step, "steps": num, "step_s": spent_s, "saving_s": saves * SAVE_S}
            # The report comes later than the step.
            self.take("metrics", at=self.now + 0.7, attempt=self.attempt, ranks={"0": row}, hosts={})
            is_first = False

    def fail(self, after_s: float, *, detect_s: float, stop_s: float, **more: Any) -> None:
        self.now += after_s
        began_at = self.state.attempts[self.attempt].began_at
        fault_s = self.now - began_at
        self.now += detect_s + stop_s
        end_s = {"fault": fault_s, "detected": fault_s + detect_s}
        end_s |= {"decided": fault_s + detect_s, "stopped": fault_s + detect_s + stop_s}
        keys = {"exit_code": 137, "text": "rank 0 was killed", "end_s": end_s, **more}
        self.take("verdict", attempt=self.attempt, duration_s=self.now - began_at, **keys)

    def end(self, after_s: float) -> None:
        self.now += after_s
        self.take("verdict", attempt=self.attempt, exit_code=0, duration_s=1.0)
        self.take("end", exit_code=0, duration_s=self.now - AT)


def test_all_time_of_a_job_is_divided_by_its_cause() -> None:
    job = _Job()
    job.start(8.0, resumed=0)
    job.train(27)
    job.fail(0.2, detect_s=1.0, stop_s=2.0)
    job.start(4.0, resumed=20)
    job.train(24)
    job.fail(0.3, detect_s=0.0, stop_s=1.0)
    job.start(4.0, resumed=10)  # the checkpoint of step 20 could not be read: steps of two attempts are lost
    job.train(40)
    job.end(3.0)
    assert job.state.spent_s == pytest.approx(
        {
            "useful": 40 * STEP_S,
            "start": 8.0,
            "restart": 1.0 + 2.0 + 4.0 + 1.0 + 4.0,
            "redone": (17 + 4) * STEP_S + 0.2 + 0.3,
            "save": (2 + 0 + 2) * SAVE_S,
            "hang": 0.0,
            "end": 3.0,
        },
        abs=0.02,
    )
    assert sum(job.state.spent_s.values()) == pytest.approx(job.now - AT)
    assert share_of(job.state.spent_s) == pytest.approx(20.0 / (job.now - AT))


def test_a_recovery_is_told_stage_by_stage() -> None:
    job = _Job()
    job.start(8.0, resumed=0)
    job.train(27)
    job.fail(0.0, detect_s=1.0, stop_s=2.0)
    job.start(4.0, resumed=20)
    (begun,) = job.state.recoveries
    assert (begun.total_s, begun.steps_again) == (None, None), "it does not train yet"
    job.train(21)
    (found,) = job.state.recoveries
    assert found.stages_s == pytest.approx(
        {
            **{"detect": 1.0, "decide": 0.0, "stop": 2.0, "connect": 1.0, "start": 1.0},
            **{"import": 1.0, "load": 1.0, "first step": STEP_S},
        }
    )
    assert found.total_s == pytest.approx(7.0 + STEP_S)
    assert (found.attempt, found.steps_again, found.cause) == (1, 7, "rank 0 was killed")


def test_steps_that_no_rank_has_told_count_if_the_next_attempt_goes_on_behind_them() -> None:
    job = _Job()
    job.start(8.0, resumed=0)
    job.train(9)
    job.fail(3 * STEP_S, detect_s=0.0, stop_s=0.0)  # in which three steps were done
    job.start(4.0, resumed=11)  # from a snapshot
    job.train(13)
    job.end(0.0)
    spent = job.state.spent_s
    assert (spent["useful"], spent["redone"]) == pytest.approx(((11 + 2) * STEP_S, STEP_S))


def test_the_time_of_attempts_that_are_not_kept_any_more_is_not_lost() -> None:
    job = _Job()
    for number in range(MAX_ATTEMPTS + 5):
        job.start(2.0, resumed=number)
        job.train(number + 2)
        job.fail(0.0, detect_s=0.0, stop_s=0.0)
    job.start(2.0, resumed=job.step)
    job.train(job.step + 3)
    job.end(0.0)
    spent = job.state.spent_s
    assert len(job.state.attempts) == MAX_ATTEMPTS
    assert spent["useful"] == pytest.approx((job.step) * STEP_S)
    assert (spent["start"], spent["restart"]) == pytest.approx((2.0, 2.0 * (MAX_ATTEMPTS + 5)))


@pytest.mark.parametrize("teller", ["watchdog", "limit"])
def test_a_wait_in_a_collective_that_never_ends_is_no_step(teller: str) -> None:
    job = _Job()
    job.start(8.0, resumed=0)
    job.train(5)
    if teller == "watchdog":
        job.take("hang", at=job.now + 10.0, rank=0, report="all_reduce waits")
    culprit = {"kind": "hang" if teller == "limit" else "rank"}
    job.fail(30.0, detect_s=0.0, stop_s=0.0, culprit=culprit)
    spent = job.state.spent_s
    assert (spent["useful"], spent["hang"], spent["redone"]) == pytest.approx((5 * STEP_S, 30.0, 0.0))


def test_a_rank_that_is_ready_after_the_first_step_of_others_makes_no_stage_longer() -> None:
    moments = (("detected", 1.0), ("imported", 3.0), ("loaded", 5.5), ("first step", 5.0))
    found = Recovery(1, "rank 0 was killed", AT, moments)
    assert found.stages_s == {"detect": 1.0, "import": 2.0, "load": 2.0, "first step": 0.0}
    assert found.total_s == 5.0

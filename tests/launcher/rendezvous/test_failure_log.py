"""Which of all failures on all nodes was first, and which only followed from the stop."""

from __future__ import annotations

import pytest

from dslaunch.launcher.rendezvous import failure_log
from dslaunch.launcher.rendezvous.failure_log import FailureLog
from dslaunch.launcher.rendezvous.messages import Failed


def rank_failed(rank: int) -> Failed:
    return Failed(rank // 2, rank, rank % 2, 77, 3, 0, "", 5.0)


LOST = Failed(1, -1, -1, 0, 3, 0, "lost", 5.0)


def test_nothing_failed() -> None:
    log = FailureLog()
    assert (log.first_heard(), log.culprit(), log.known()) == (None, None, [])


def test_the_culprit_is_the_earliest_though_it_was_heard_of_later() -> None:
    log = FailureLog()
    log.add(12.0, rank_failed(0))
    log.stopped_at = 13.0
    log.add(11.0, LOST)
    assert log.first_heard() == (12.0, rank_failed(0)._replace(age_s=0.0))
    assert log.culprit() == (11.0, LOST._replace(age_s=0.0))


def test_a_rank_that_fails_after_the_stop_was_told_to_and_a_node_was_not() -> None:
    log = FailureLog()
    log.add(12.0, rank_failed(0))
    log.stopped_at = 13.0
    log.add(14.0, rank_failed(1))
    log.add(15.0, LOST)
    assert [at for at, _ in log.known()] == [12.0, 15.0]


def test_a_job_that_was_stopped_for_another_reason_has_no_culprit() -> None:
    log = FailureLog()
    log.stopped_at = 10.0
    log.add(12.0, rank_failed(0))
    assert log.culprit() is None


def test_not_all_of_a_flood_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_log, "MAX_FAILURES", 3)
    log = FailureLog()
    for number in range(9):
        log.add(float(number), rank_failed(number))
    assert [at for at, _ in log.known()] == [0.0, 1.0, 2.0]

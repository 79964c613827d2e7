"""What the ranks of a job compare where not all of them hold the same model."""

from __future__ import annotations

from dslaunch.runtime.comm.flight_recorder import JOB_LANE
from dslaunch.runtime.comm.rank_group import Job
from dslaunch.runtime.comm.wire import Wire
from tests.runtime.ranks import Ranks


def _compared(rank: int, leaders: tuple[int, ...]) -> tuple[int, list[str], tuple[int, int] | None]:
    job = Job(Wire(), leaders=leaders)
    return job.lane, job.of_peers(["a", "b", "c"]), job.first_difference(["a", "b", "c"])


def test_ranks_with_one_leader_are_compared_and_the_job_has_a_lane_of_its_own(ranks: Ranks) -> None:
    own = ranks(_compared, (0, 1, 0), world_size=3)
    assert own == [
        (JOB_LANE, ["a", "c"], (2, 0)),
        (JOB_LANE, ["b"], (2, 0)),
        (JOB_LANE, ["a", "c"], (2, 0)),
    ]
    assert ranks(_compared, (0, 0, 0), world_size=3) == [(0, ["a", "b", "c"], (1, 0))] * 3

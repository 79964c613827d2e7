"""What a worker learns from its environment."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dslaunch import ConfigError
from dslaunch.runtime.comm.environment import read_environment


def test_a_launched_worker() -> None:
    worker = read_environment({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "DEEPSPEED_TIMEOUT": "7"})
    assert (worker.rank, worker.local_rank, worker.world_size) == (5, 1, 8)
    assert worker.is_launched
    assert worker.timeout == timedelta(minutes=7)


def test_nothing_said_means_a_single_process() -> None:
    worker = read_environment({})
    assert (worker.rank, worker.local_rank, worker.world_size, worker.is_launched) == (0, 0, 1, False)
    assert worker.timeout == timedelta(minutes=30)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' in the environment: must be a whole number"),
    ],
)
def test_nonsense_is_refused_by_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_environment(environ)

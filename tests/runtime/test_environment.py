"""What a worker learns from its environment."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dslaunch import ConfigError
from dslaunch.runtime.environment import read_environment


def test_a_launched_worker() -> None:
    worker = read_environment({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "DEEPSPEED_TIMEOUT": "7"})
    assert (worker.rank, worker.local_rank, worker.world_size) == (5, 1, 8)
    assert worker.is_launched
    assert worker.timeout == timedelta(minutes=7)
    assert (worker.watchdog_s, worker.checks_order) == (None, False)


def test_what_watches_over_collectives() -> None:
    worker = read_environment({"DSLAUNCH_WATCHDOG_S": "2.5", "DSLAUNCH_DEBUG": "collectives"})
    assert (worker.watchdog_s, worker.checks_order) == (2.5, True)
    worker = read_environment({"DSLAUNCH_WATCHDOG_S": "0", "DSLAUNCH_DEBUG": ""})
    assert (worker.watchdog_s, worker.checks_order) == (0.0, False)


def test_the_mesh_that_the_launcher_was_given() -> None:
    assert read_environment({"DSLAUNCH_MESH": "pp=2,dp=4,tp=2"}).mesh == (("pp", 2), ("dp", 4), ("tp", 2))
    assert read_environment({}).mesh == ()
    worker = read_environment({"DSLAUNCH_MESH": "pp=2,dp=4,tp=2,order=tp-dp-pp"})
    assert (len(worker.mesh), worker.mesh_order) == (3, ("tp", "dp", "pp"))


def test_nothing_said_means_a_single_process() -> None:
    worker = read_environment({})
    assert (worker.rank, worker.local_rank, worker.world_size, worker.is_launched) == (0, 0, 1, False)
    assert worker.timeout == timedelta(minutes=30)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"DEEPSPEED_TIMEOUT": "0"}, "DEEPSPEED_TIMEOUT=0 in the environment: must be 1 or more, in minutes"),
        ({"DEEPSPEED_TIMEOUT": "1.5"}, "DEEPSPEED_TIMEOUT='1.5' in the environment: must be a whole number"),
        ({"DSLAUNCH_WATCHDOG_S": "-1"}, "DSLAUNCH_WATCHDOG_S='-1' in the environment: must be seconds, or 0"),
        ({"DSLAUNCH_WATCHDOG_S": "inf"}, "DSLAUNCH_WATCHDOG_S='inf' in the environment: must be seconds"),
        ({"DSLAUNCH_WATCHDOG_S": "5m"}, "DSLAUNCH_WATCHDOG_S='5m' in the environment: must be seconds"),
        (
            {"DSLAUNCH_DEBUG": "all"},
            "DSLAUNCH_DEBUG='all' in the environment: must be 'collectives', or unset",
        ),
        ({"DSLAUNCH_MESH": "tp=0"}, "DSLAUNCH_MESH='tp=0' in the environment: must be sizes of pp, dp, ep"),
        ({"DSLAUNCH_MESH": "mp=2"}, "DSLAUNCH_MESH='mp=2' in the environment: must be sizes of pp, dp, ep"),
        (
            {"DSLAUNCH_MESH": "tp=2,order=tp-ep"},
            "'tp=2,order=tp-ep' in the environment: .* an order of all but",
        ),
        (
            {"DSLAUNCH_MESH": "tp=2,order=tp-tp"},
            "'tp=2,order=tp-tp' in the environment: .* an order of all but",
        ),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' in the environment: must be a whole number"),
    ],
)
def test_nonsense_is_refused_by_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_environment(environ)

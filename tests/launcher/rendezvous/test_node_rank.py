from __future__ import annotations

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.rendezvous.node_rank import find_node_rank

POOL = ("node1", "node2.lan", "10.0.0.3", "fd00::4")


def find(
    given: int | None = None,
    *,
    selected: tuple[str, ...] = POOL,
    environ: dict[str, str] | None = None,
    own_names: tuple[str, ...] = ("elsewhere",),
    pool: tuple[str, ...] = POOL,
) -> int:
    return find_node_rank(given, selected=selected, pool=pool, environ=environ or {}, own_names=own_names)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_NODEID": "2"}, 2),
        ({"JOB_COMPLETION_INDEX": "1"}, 1),
        ({"SLURM_NODEID": "2", "JOB_COMPLETION_INDEX": "1"}, 2),
        ({"SLURM_NODEID": "", "JOB_COMPLETION_INDEX": "1"}, 1),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 3),
    ],
)
def test_a_scheduler_says_which_node_it_is(environ: dict[str, str], expected: int) -> None:
    assert find(environ=environ) == expected
    assert find(0, environ=environ) == 0, "--node_rank comes first"


@pytest.mark.parametrize(
    ("own_names", "expected"),
    [
        (("node1",), 0),
        (("NODE1",), 0),
        (("node1.lan",), 0),
        (("node2.lan",), 1),
        (("node2",), 1),
        (("node2.other",), 1),
        (("x", "10.0.0.3"), 2),
        (("x", "fd00:0::4"), 3),
    ],
)
def test_else_the_host_s_own_name_or_address_does(own_names: tuple[str, ...], expected: int) -> None:
    assert find(own_names=own_names) == expected


def test_a_full_name_counts_more_than_a_short_one() -> None:
    assert find(own_names=("a.y",), pool=("a.x", "a.y"), selected=("a.x", "a.y")) == 1


def test_a_scheduler_counts_all_hosts_and_node_rank_the_selected_ones() -> None:
    selected = ("node1", "10.0.0.3")
    assert find(1, selected=selected) == 1
    assert find(selected=selected, environ={"SLURM_NODEID": "2"}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"given": 4}, "--node_rank=4 is not one of the 4 hosts, 0 to 3"),
        ({"environ": {"SLURM_NODEID": "4"}},
         "SLURM_NODEID=4 is not one of the 4 hosts, 0 to 3 of the hostfile"),
        ({"environ": {"SLURM_NODEID": "9" * 5000}},
         f"SLURM_NODEID={'9' * 80} is not one of the 4 hosts, 0 to 3 of the hostfile"),
        ({"environ": {"JOB_COMPLETION_INDEX": "one"}}, "JOB_COMPLETION_INDEX=one is not one of"),
        ({"environ": {"JOB_COMPLETION_INDEX": "-1"}}, "JOB_COMPLETION_INDEX=-1 is not one of"),
        ({"environ": {"SLURM_NODEID": "1"}, "selected": ("node1",)},
         "this node is node2.lan (SLURM_NODEID=1), which does not take part (node1 does)"),
        ({"own_names": ("node2",), "selected": ("node1",)},
         "this node is node2.lan (by its name), which does not take part"),
        ({}, "Tried --node_rank (not given), SLURM_NODEID (not set), JOB_COMPLETION_INDEX (not set), "
             "OMPI_COMM_WORLD_RANK (not set), this host's names and addresses (elsewhere: none of these is "
             "in the hostfile); give --node_rank"),
        ({"own_names": ("node1", "10.0.0.3")}, "node1 and 10.0.0.3 both fit"),
        ({"environ": {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}},
         "mpirun runs more than one process per node"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_an_error(words: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError) as raised:
        find(**words)  # type: ignore[arg-type]
    assert message in str(raised.value)
    assert raised.value.exit_code == 2

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.inputs.env_file import EnvEntry, expand
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import Selected, select
from dslaunch.launcher.job.plan import (
    Endpoint,
    NodePlan,
    Plan,
    Program,
    environment_of,
    job_of,
    plan_nodes,
    plan_program,
    python_of,
)
from dslaunch.launcher.wire.job import as_json

GOLDEN = Path(__file__).parents[1] / "golden"
SCRIPT = plan_program("train.py", ("--lr", "0.1"), python="/usr/bin/python3")


def chosen(*num_slots: int) -> tuple[Selected, ...]:
    return select(tuple(Host(name=f"w{place}", slots=slots) for place, slots in enumerate(num_slots)))


def planned(*num_slots: int, program: Program = SCRIPT) -> tuple[NodePlan, ...]:
    return plan_nodes(chosen(*num_slots), program, local_names=frozenset())


def whole_plan() -> Plan:
    """Two unequal hosts, everything set."""
    hosts = (
        Host(name="node1", slots=2),
        Host(
            name="node2",
            slots=4,
            devices=("3", "GPU-1f", "0", "2"),
            user="ada",
            port=2222,
            python="~/py/bin/python",
            cwd="/scratch/job",
            env=(EnvEntry(name="PATH", value=("", "HOME", "/bin:", "PATH", ""), source="hosts:2"),),
        ),
    )
    return Plan(
        nodes=plan_nodes(
            select(hosts, include="node1@node2:0,2,GPU-1f"),
            plan_program("train.py", ("--name", "two words", "caf\udcc3"), python="/opt/py/bin/python"),
            local_names=frozenset({"node1"}),
        ),
        master=Endpoint(address=None, port=29500, is_port_fixed=False),
        program=plan_program("train.py", ("--name", "two words", "caf\udcc3"), python="/opt/py/bin/python"),
        cwd="/home/ada/job",
        venv_script="env.sh",
        environment=(
            EnvEntry(name="PYTHONPATH", value=("/home/ada/job",), source="the shell"),
            EnvEntry(name="PATH", value=("/opt/bin:", "PATH", ""), source="/home/ada/.deepspeed_env:1"),
        ),
        kill_grace_s=30.0,
        heartbeat_s=20.0,
    )


@pytest.mark.parametrize(
    ("num_slots", "ranks"),
    [
        ((1,), [[(0, 0)]]),
        ((3,), [[(0, 0), (1, 1), (2, 2)]]),
        ((2, 2), [[(0, 0), (1, 1)], [(2, 0), (3, 1)]]),
        # Unequal hosts: local_rank = rank % slots is a rotation, and programs assert it.
        ((2, 3), [[(0, 0), (1, 1)], [(2, 2), (3, 0), (4, 1)]]),
        ((3, 2), [[(0, 0), (1, 1), (2, 2)], [(3, 1), (4, 0)]]),
        ((1, 2, 4), [[(0, 0)], [(1, 1), (2, 0)], [(3, 3), (4, 0), (5, 1), (6, 2)]]),
    ],
)
def test_ranks_count_through_the_hosts_and_local_ranks_are_rank_modulo_slots(
    num_slots: tuple[int, ...], ranks: list[list[tuple[int, int]]]
) -> None:
    nodes = planned(*num_slots)
    assert [[(one.rank, one.local_rank) for one in node.ranks] for node in nodes] == ranks
    assert [node.node_rank for node in nodes] == list(range(len(num_slots)))


def test_what_ranks_have_in_common_is_there_once() -> None:
    """Or the ranks of a large job take gigabytes."""
    first, second = planned(4, 4)
    for one, other in zip(first.ranks, second.ranks, strict=True):
        assert one.arguments is other.arguments
        assert one.env[1] is other.env[1]
    assert len({id(one.env[-1]) for one in first.ranks}) == 1


@given(num_slots=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_rank_and_every_local_rank_is_there_once(num_slots: list[int]) -> None:
    nodes = planned(*num_slots)
    assert [one.rank for node in nodes for one in node.ranks] == list(range(sum(num_slots)))
    for node, slots in zip(nodes, num_slots, strict=True):
        assert sorted(one.local_rank for one in node.ranks) == list(range(slots))
        assert len(node.devices) == len(node.ranks)


def test_each_rank_gets_its_place_in_the_job_as_variables() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE")
    as_torchrun = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    table = [tuple(dict(one.env)[name] for name in names) for node in planned(2, 3) for one in node.ranks]
    assert table == [
        ("0", "0", "5", "2", "2", "0", "2"),
        ("1", "1", "5", "2", "2", "0", "2"),
        ("2", "2", "5", "3", "3", "1", "2"),
        ("3", "0", "5", "3", "3", "1", "2"),
        ("4", "1", "5", "3", "3", "1", "2"),
    ]
    table = [
        tuple(dict(one.env)[name] for name in as_torchrun) for node in planned(2, 1) for one in node.ranks
    ]
    assert table == [
        ("0", "2", "default", "0", "3"),
        ("0", "2", "default", "1", "3"),
        ("1", "2", "default", "2", "3"),
    ]
    given = {name for node in planned(2, 3) for one in node.ranks for name, _ in one.env}
    assert given == {*names, *as_torchrun}


def test_slots_left_out_do_not_count() -> None:
    (node,) = plan_nodes(
        select((Host(name="w0", slots=8),), include="w0:1,5"), SCRIPT, local_names=frozenset()
    )
    assert node.devices == ("1", "5")
    assert [(one.rank, one.local_rank) for one in node.ranks] == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["/py", "-u", "job", "--local_rank=1", "a", "--b"]),
        ({"is_module": True}, ["/py", "-u", "-m", "job", "--local_rank=1", "a", "--b"]),
        ({"no_python": True}, ["job", "--local_rank=1", "a", "--b"]),
        ({"no_local_rank": True}, ["/py", "-u", "job", "a", "--b"]),
        ({"no_python": True, "no_local_rank": True}, ["job", "a", "--b"]),
        ({"is_module": True, "no_local_rank": True}, ["/py", "-u", "-m", "job", "a", "--b"]),
    ],
)
def test_the_command_of_a_rank(given: dict[str, bool], words: list[str]) -> None:
    program = plan_program("job", ("a", "--b"), python="/py", **given)
    second = planned(2, program=program)[0].ranks[1]
    assert [*([program.python] if program.python else []), *second.arguments] == words


@pytest.mark.parametrize(
    ("given", "script"),
    [({}, "job"), ({"is_module": True}, None), ({"no_python": True}, None)],
)
def test_only_a_python_script_is_a_file_that_must_exist(given: dict[str, bool], script: str | None) -> None:
    assert plan_program("job", (), python="/py", **given).script == script


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        (Host(name="here", slots=1), True),
        (Host(name="HERE", slots=1), True),
        (Host(name="there", slots=1), False),
        (Host(name="here", slots=1, user="ada"), False),  # another user means a login
        (
            Host(name="here", slots=1, port=2222),
            False,
        ),  # another port means another sshd, e.g. of a container
    ],
)
def test_a_host_is_local_if_nothing_but_this_machine_s_name_is_given(host: Host, is_local: bool) -> None:
    (node,) = plan_nodes(select((host,)), SCRIPT, local_names=frozenset({"here"}))
    assert node.is_local is is_local


def as_objects(value: Any) -> Any:
    """Named tuples as dicts, all the way down; `json` makes lists of them."""
    if hasattr(value, "_asdict"):
        return {name: as_objects(one) for name, one in value._asdict().items()}
    return [as_objects(one) for one in value] if isinstance(value, tuple) else value


def test_a_plan_as_json() -> None:
    assert whole_plan().world_size == 5
    assert json.dumps(as_objects(whole_plan()), indent=2) + "\n" == (GOLDEN / "plan.json").read_text()


def test_the_part_of_a_plan_that_goes_to_a_node() -> None:
    plan = whole_plan()
    jobs = [job_of(plan, node) for node in plan.nodes]
    assert json.dumps(as_json(jobs), indent=2) + "\n" == (GOLDEN / "jobs.json").read_text()


def test_what_a_host_says_comes_after_what_the_job_says() -> None:
    plan = whole_plan()
    first, second = plan.nodes
    assert environment_of(plan, first.host) == plan.environment
    found = expand(environment_of(plan, second.host), {"HOME": "/home/ada", "PATH": "/bin"})
    assert found["PATH"] == "/home/ada/bin:/opt/bin:/bin"
    assert found["PYTHONPATH"] == "/scratch/job:/home/ada/job"


def test_a_folder_in_the_home_is_in_the_python_path() -> None:
    host = Host(name="w", slots=1, cwd="~/my job")
    found = expand(environment_of(whole_plan(), host), {"HOME": "/home/ada"})
    assert found["PYTHONPATH"] == "/home/ada/my job:/home/ada/job"


def test_without_python_a_host_s_python_is_not_used() -> None:
    plan = whole_plan()._replace(program=plan_program("./run.sh", (), python="/py", no_python=True))
    assert [python_of(plan, node.host) for node in plan.nodes] == [None, None]


def test_behind_a_prefix_the_python_found_there_runs_unless_the_hostfile_names_one() -> None:
    plan = whole_plan()
    named = Host(name="w", slots=1, python="/opt/python", exec_prefix=("true",))
    assert python_of(plan, named) == "/opt/python"
    assert python_of(plan, named._replace(python=None)) == ""
    assert python_of(plan, named._replace(python=None, exec_prefix=())) == plan.program.python


def test_only_node_0_chooses_the_port() -> None:
    plan = whole_plan()
    assert [job_of(plan, node).master_port for node in plan.nodes] == [29500, None]


if __name__ == "__main__":  # python tests/launcher/job/test_plan.py: write the golden files anew
    made = whole_plan()
    (GOLDEN / "plan.json").write_text(json.dumps(as_objects(made), indent=2) + "\n")
    (GOLDEN / "jobs.json").write_text(
        json.dumps(as_json([job_of(made, node) for node in made.nodes]), indent=2) + "\n"
    )
    sys.exit("written; now look at the diff")

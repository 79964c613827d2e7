from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.node.observe.core_binding import (
    Core,
    format_ranges,
    parse_ranges,
    read_cores,
    share_cores,
    share_near,
)
from dslaunch.launcher.options.binding import BindingOptions
from dslaunch.launcher.options.option import read
from tests.lab import Lab
from tests.launcher.command import Command
from tests.launcher.local_job import Job


def options(*words: str) -> BindingOptions:
    context = cli.dslaunch.make_context("dslaunch", [*words, "train.py"])
    return read(BindingOptions, context.params)


# The options.


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("0", (0,)),
        ("0,2-4", (0, 2, 3, 4)),
        ("0,2-4,6,8-9", (0, 2, 3, 4, 6, 8, 9)),
        ("7-7", (7,)),
    ],
)
def test_a_list_of_cores(text: str, cores: tuple[int, ...]) -> None:
    assert options("--bind_cores_to_rank", f"--bind_core_list={text}") == BindingOptions(
        is_on=True, cores=cores
    )


@pytest.mark.parametrize(
    "text", ["0,2-6,5-9", "8,2-6", "1,6-2", "1,1", "2-4,4", "a", "1,", "-1", "1-", "1--2", "1 2", "0x1"]
)
def test_a_list_must_ascend_and_name_no_core_twice(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"write e\.g\. 0,2-4"):
        options("--bind_cores_to_rank", f"--bind_core_list={text}")


def test_a_list_without_binding_is_a_mistake() -> None:
    with pytest.raises(LaunchError, match="add --bind_cores_to_rank"):
        options("--bind_core_list=0")
    assert options() == BindingOptions(cores=None)
    assert options("--bind_cores_to_rank") == BindingOptions(is_on=True, cores=())


@given(st.sets(st.integers(0, 40)).map(sorted))
def test_ranges_are_read_as_they_are_written(numbers: list[int]) -> None:
    assert parse_ranges(format_ranges(numbers)) == numbers


# The machine.

FLAT = [Core(cpu, 0, 0) for cpu in range(8)]
# Two sockets of two cores with two threads each; the kernel counts first threads first.
TWO = [Core(cpu, cpu // 2 % 2, cpu // 4) for cpu in range(8)]
UNEVEN = [Core(0, 0, 0), *(Core(cpu, 1, 0) for cpu in range(1, 6))]


@pytest.mark.parametrize(
    ("cores", "num_ranks", "uses_all", "shares"),
    [
        (FLAT, 1, False, ["0-7"]),
        (FLAT, 2, False, ["0-3", "4-7"]),
        (FLAT, 3, False, ["0-1", "2-3", "4-5"]),
        (FLAT, 8, False, list("01234567")),
        (FLAT, 9, False, []),
        # One thread of each core, within one node.
        (TWO, 1, False, ["0-3"]),
        (TWO, 2, False, ["0-1", "2-3"]),
        (TWO, 4, False, list("0123")),
        # Three ranks do not divide by two nodes.
        (TWO, 3, False, list("012")),
        # Second threads only when there are not enough cores.
        (TWO, 8, False, list("01452367")),
        (TWO, 5, False, list("01452")),
        (TWO, 9, False, []),
        # Of a list that was given everything is used.
        (TWO, 2, True, ["0-1,4-5", "2-3,6-7"]),
        (TWO, 4, True, ["0-1", "4-5", "2-3", "6-7"]),
        # Equal shares come before nodes.
        (UNEVEN, 2, False, ["0-2", "3-5"]),
    ],
)
def test_every_rank_gets_an_equal_share_of_neighbours(
    cores: list[Core], num_ranks: int, uses_all: bool, shares: list[str]
) -> None:
    found = share_cores(cores, num_ranks, uses_all=uses_all)
    assert [format_ranges(sorted(share)) for share in found] == shares


@given(
    cores=st.lists(
        st.builds(Core, st.integers(0, 99), st.integers(0, 3), st.integers(0, 1)),
        min_size=1,
        unique_by=lambda core: core.cpu,
    ),
    num_ranks=st.integers(1, 20),
    uses_all=st.booleans(),
)
def test_shares_are_disjoint_equal_and_there_if_they_can_be(
    cores: list[Core], num_ranks: int, uses_all: bool
) -> None:
    shares = share_cores(cores, num_ranks, uses_all=uses_all)
    assert len(shares) == (num_ranks if len(cores) >= num_ranks else 0)
    given_out = [cpu for share in shares for cpu in share]
    assert len(set(given_out)) == len(given_out)
    assert {*given_out} <= {core.cpu for core in cores}
    assert len({len(share) for share in shares}) <= 1


NODES = ({0, 1, 4, 5}, {2, 3, 6, 7})  # of TWO


@pytest.mark.parametrize(
    ("near", "uses_all", "shares"),
    [
        ([NODES[0], NODES[1]], False, ["0-1", "2-3"]),
        ([NODES[1], NODES[0]], False, ["2-3", "0-1"]),
        ([NODES[1], NODES[0], NODES[1], NODES[0]], False, ["2", "0", "3", "1"]),
        ([NODES[1], NODES[0]], True, ["2-3,6-7", "0-1,4-5"]),
        ([NODES[1], NODES[1]], False, ["2", "3"]),  # cores near no GPU are left alone
        ([set(range(8))] * 2, False, ["0-1", "2-3"]),  # one socket
        ([NODES[0], NODES[0], NODES[1]], False, ["0", "1", "2"]),  # equal shares
        ([NODES[0] | {90}, NODES[0] | {91}], False, ["0", "1"]),  # 90 and 91 may not be used
        ([NODES[1]] * 5, False, []),
        ([NODES[0], {90, 91}], False, []),
        ([NODES[0], NODES[0] | NODES[1]], False, []),
    ],
)
def test_every_rank_gets_cores_near_its_gpu(near: list[set[int]], uses_all: bool, shares: list[str]) -> None:
    found = share_near(TWO, near, uses_all=uses_all)
    assert [format_ranges(sorted(share)) for share in found] == shares


def test_the_machine_is_read_from_sys(tmp_path: Path) -> None:
    devices = tmp_path / "devices" / "system"
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        (devices / "node" / f"node{node}").mkdir(parents=True)
        (devices / "node" / f"node{node}" / "cpulist").write_text(cpus + "\n")
    (devices / "node" / "node2").mkdir()  # memory only
    (devices / "node" / "node2" / "cpulist").write_text("\n")
    for cpu in range(8):
        (devices / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
        siblings = f"{cpu % 4},{cpu % 4 + 4}\n"
        (devices / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(siblings)
    assert read_cores(set(range(8)), str(tmp_path)) == TWO
    # Of a core whose first thread is not allowed, the second one is the first.
    assert read_cores({1, 4}, str(tmp_path)) == [Core(1, 0, 0), Core(4, 0, 0)]
    assert read_cores({1, 4}, str(tmp_path / "nowhere")) == [Core(1, 0, 0), Core(4, 0, 0)]


# Jobs.

SHOW = """
import os
print(os.environ["RANK"], sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"])
"""
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")


def lines(job: Job) -> list[str]:
    return sorted(line.partition(" | ")[2] for line in job.out.splitlines())


def run(folder: Path, *words: str, code: int = 0, env: dict[str, str] | None = None) -> Job:
    (folder / "train.py").write_text(SHOW)
    job = Job(folder, [*words, "train.py"], env=env)
    try:
        assert job.wait() == code, job.err
    finally:
        job.end()
    return job


@pytest.mark.slow
@needs_two_cores
def test_ranks_run_on_their_own_cores(tmp_path: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    words = ("--bind_cores_to_rank", f"--bind_core_list={first},{second}", "--num_gpus=2")
    job = run(tmp_path, *words, env={"OMP_NUM_THREADS": "7"})
    assert lines(job) == [f"0 [{first}] 1", f"1 [{second}] 1"]
    assert f"each rank is bound to 1 core: {first}, {second}" in job.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "env", "code", "message"),
    [
        (["--num_gpus=400"], {}, 3, "--bind_cores_to_rank: 400 ranks cannot share cores "),
        (["--bind_core_list=0-1", "--num_gpus=3"], {}, 3, "3 ranks cannot share --bind_core_list=0-1"),
        (
            ["--bind_core_list=0,5000-5001"],
            {},
            3,
            "--bind_core_list: core 5000-5001 cannot be used here; allowed are 0",
        ),
        ([], {"KMP_AFFINITY": "compact"}, 2, "KMP_AFFINITY is set and binds threads by itself; unset it"),
    ],
)
def test_a_host_that_cannot_do_it_says_so_before_anything_starts(
    words: list[str], env: dict[str, str], code: int, message: str, tmp_path: Path
) -> None:
    job = run(tmp_path, "--bind_cores_to_rank", *words, code=code, env=env)
    assert message in job.err
    assert job.out == ""


@pytest.mark.slow
@needs_two_cores
def test_binding_works_on_all_hosts(lab: Lab) -> None:
    folder = lab.shared / "binding"
    folder.mkdir()
    (folder / "train.py").write_text(SHOW)
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=1\n")
    command = Command(lab.head, folder, "-H", "hosts", "--bind_cores_to_rank", "train.py")
    assert command.wait() == 0, command.err
    found = sorted(line.partition(" | ")[2] for line in command.out.splitlines())
    cores = [one.cpu for one in read_cores(os.sched_getaffinity(0)) if one.thread == 0]
    half = len(cores) // 2
    assert found == [
        f"0 {cores[:half]} {half}",
        f"1 {cores[half : 2 * half]} {half}",
        f"2 {cores} {len(cores)}",
    ]

"""What srun is told for a choice of hosts and slots, and what is read from what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.external import srun
from dslaunch.launcher.external.rank_start import RankStart
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import select

POOL = (Host(name="worker-0", slots=4), Host(name="worker-1", slots=4))


# The numbers of github.com/deepspeedai/DeepSpeed/pull/8304, for a pool of 2 hosts with 4 slots.
@pytest.mark.parametrize(
    ("choice", "num_ranks", "hosts"),
    [
        ({}, 8, ["worker-0"] * 4 + ["worker-1"] * 4),
        ({"include": "worker-1:0,2"}, 2, ["worker-1"] * 2),
        ({"exclude": "worker-1:0"}, 7, ["worker-0"] * 4 + ["worker-1"] * 3),
        ({"num_gpus": 2}, 4, ["worker-0"] * 2 + ["worker-1"] * 2),
        ({"num_nodes": 1}, 4, ["worker-0"] * 4),
    ],
)
def test_as_many_tasks_as_slots_are_chosen(
    choice: dict[str, str | int], num_ranks: int, hosts: list[str]
) -> None:
    slots = tuple((one.host.name, len(one.devices)) for one in select(POOL, **choice))  # type: ignore[arg-type]
    start = RankStart(
        program="srun", slots=slots, words=("start",), names=("A",), launcher_args=("--gpus-per-node=4",)
    )
    argv, hostfile = srun.srun_command(start)
    assert argv == (
        "srun",
        "-n",
        str(num_ranks),
        f"--nodes={len(slots)}",
        "--nodelist=<hostfile>",
        "--distribution=arbitrary",
        "--kill-on-bad-exit=1",
        "--quit-on-interrupt",
        "--gpus-per-node=4",
        "--export=ALL",
        "start",
    )
    assert hostfile == "".join(f"{host}\n" for host in hosts)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("srun: error: node2: task 2: Exited with exit code 3", ("rank 2 on node2 exited with code 3", 3)),
        ("srun: error: node2: tasks 2-3: Exited with exit code 1",
         ("rank 2-3 on node2 exited with code 1", 1)),
        ("srun: error: n: task 0: Killed", ("rank 0 on n was killed by SIGKILL (9)", 137)),
        ("srun: error: n: tasks 0,4: Segmentation fault (core dumped)",
         ("rank 0,4 on n was killed by SIGSEGV (11)", 139)),
        ("srun: error: n: task 0: Terminated", ("rank 0 on n was killed by SIGTERM (15)", 143)),
        ("srun: error: n: task 0: Out Of Memory", None),
        ("srun: error: Unable to create step", None),
        ("node2: task 2: Exited with exit code 3", None),
        ("my srun: error: n: task 0: Killed", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_first_failure_is_read_from_what_srun_says(line: str, expected: tuple[str, int] | None) -> None:
    assert srun.failure_in(line) == srun.failure_in(line + "\n") == expected


def test_no_srun_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LaunchError, match="srun is not installed on this machine; start on a login node"
    ) as refused:
        srun.find_srun()
    assert refused.value.exit_code == 3

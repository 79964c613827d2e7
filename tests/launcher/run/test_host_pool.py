"""Where a job's hosts come from: the command line, the default hostfile, a batch system, or nowhere."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.host_sources import SOURCES, TASKS
from dslaunch.launcher.options import Options
from dslaunch.launcher.options.backend import LAUNCHERS, BackendOptions
from dslaunch.launcher.options.rendezvous import RendezvousOptions
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.run import host_pool

Pooled = Callable[..., "tuple[dict[str, int | None], str]"]
SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
FOUND = "dslaunch: hosts from Slurm, SLURM_JOB_NODELIST: 2 hosts, 4 slots\n"
STEP = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}


@pytest.fixture(autouse=True)
def _no_batch_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables = {one.size_variable for one in TASKS} | {one.variable for one in SOURCES}
    for name in [*os.environ]:
        if name in variables or name.startswith(("SLURM_", "PET_")) or name == "CUDA_VISIBLE_DEVICES":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_pool, "DEFAULT_HOSTFILE", tmp_path / "job" / "hostfile")
    monkeypatch.setattr(host_pool, "count_accelerators", lambda: 4)
    monkeypatch.setattr(host_pool.socket, "gethostname", lambda: "head.example.com")


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> Pooled:
    """The hosts with their slots, and what is said."""

    def pool(environ: dict[str, str] | None = None, **options: Any) -> tuple[dict[str, int | None], str]:
        for name, value in (environ or {}).items():
            monkeypatch.setenv(name, value)
        said = io.BytesIO()
        console = Console(log_level="info", err=said)
        found = host_pool.read_pool(Options(program="train.py", **options), console)
        console.drain(10.0)
        return {host.name: host.slots for host in found.hosts}, said.getvalue().decode()

    return pool


def test_hosts_of_a_batch_system_are_found_and_one_line_says_so(pooled: Pooled) -> None:
    assert pooled(SLURM) == ({"n1": 2, "n2": 2}, FOUND)


def test_a_list_a_file_and_the_default_hostfile_win_over_a_batch_system(
    pooled: Pooled, tmp_path: Path
) -> None:
    Path("a:1").write_text("file slots=7\n")
    assert pooled(SLURM, hostfile="a:3,b:1") == ({"a": 3, "b": 1}, "")
    assert pooled(SLURM, hostfile="a:1") == ({"file": 7}, "")  # a file of that name wins over a list
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "hostfile").write_text("default slots=5\n")
    assert pooled(SLURM) == ({"default": 5}, "")
    assert pooled(SLURM, hostfile="None") == ({"default": 5}, "")


def test_a_file_that_the_batch_system_names_is_read_in_its_form(pooled: Pooled, tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("n1\nn1\nn2\n")
    assert pooled({"PBS_NODEFILE": str(path)}, hostfile=str(path)) == ({"n1": 2, "n2": 1}, "")
    assert pooled()[1] == f"dslaunch: hosts from PBS, PBS_NODEFILE={path}: 2 hosts, 3 slots\n"


@pytest.mark.parametrize("name", ["head", "HEAD.example.com", "head.cluster", "localhost"])
def test_an_allocation_of_this_machine_alone_changes_nothing(pooled: Pooled, name: str) -> None:
    environ = {"SLURM_JOB_NODELIST": name, "SLURM_TASKS_PER_NODE": "16", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert pooled(environ) == ({"localhost": 2}, "")


def test_an_allocation_of_one_other_host_is_used(pooled: Pooled) -> None:
    hosts, said = pooled({"SLURM_JOB_NODELIST": "n7", "SLURM_TASKS_PER_NODE": "3"})
    assert (hosts, said) == ({"n7": 3}, "dslaunch: hosts from Slurm, SLURM_JOB_NODELIST: 1 host, 3 slots\n")


def test_the_local_launcher_and_that_of_slurm_mean_what_they_say(pooled: Pooled) -> None:
    """srun starts on the nodes by their names, and takes the tasks that Slurm counts without a look."""
    local, slurm = (BackendOptions(launcher=LAUNCHERS[name]) for name in ("local", "slurm"))
    assert pooled(SLURM, backend=local) == ({"localhost": 4}, "")
    assert pooled({"SLURM_GPUS_PER_NODE": ""}, backend=slurm)[0] == {"n1": 1, "n2": 1}
    assert pooled({"SLURM_JOB_NODELIST": "head", "SLURM_TASKS_PER_NODE": "4"}, backend=slurm)[0] == {
        "head": 4
    }


def test_each_of_many_tasks_does_not_start_a_job_on_all_hosts(pooled: Pooled) -> None:
    with pytest.raises(LaunchError) as caught:
        pooled(SLURM | STEP)
    assert str(caught.value) == (
        "this is one of 8 processes that srun started (SLURM_STEP_NUM_TASKS=8, SLURM_PROCID=3), and each "
        "would start a job on the 2 hosts of SLURM_JOB_NODELIST; start dslaunch once, without it; or "
        "once on each host with --no_ssh; or name the hosts with --hostfile"
    )


@pytest.mark.parametrize(
    "options", [{"hostfile": "a:1"}, {"backend": BackendOptions(launcher=LAUNCHERS["local"])}]
)
def test_many_tasks_with_hosts_of_their_own_are_warned(pooled: Pooled, options: dict[str, Any]) -> None:
    said = pooled(SLURM | STEP, **options)[1]
    assert "warning: this is one of 8 processes that srun started" in said
    assert "and each starts a job of its own" in said


def test_started_once_on_each_host_of_a_step_the_hosts_are_those_of_the_step(pooled: Pooled) -> None:
    environ = SLURM | STEP | {"SLURM_STEP_NODELIST": "n2"}
    hosts, said = pooled(environ, rendezvous=RendezvousOptions(no_ssh=True))
    assert hosts == {"n2": 2}
    assert said == "dslaunch: hosts from Slurm, SLURM_STEP_NODELIST: 1 host, 2 slots\n"


@pytest.mark.parametrize(("visible", "is_said"), [("0,1", False), ("2,3", True)])
def test_devices_that_the_slots_do_not_tell_of_are_warned_of(
    pooled: Pooled, visible: str, is_said: bool
) -> None:
    said = pooled(SLURM | {"CUDA_VISIBLE_DEVICES": visible})[1]
    assert (f"CUDA_VISIBLE_DEVICES={visible} is not used" in said) == is_said


def test_variables_for_torchrun_that_ask_for_hosts_without_names_are_warned_of(pooled: Pooled) -> None:
    hosts, said = pooled({"PET_NNODES": "1:2"})
    assert hosts == {"localhost": 4}
    assert "PET_NNODES=1:2: torchrun's variables name no hosts" in said
    assert pooled({"PET_NNODES": "1"})[1] == ""


def test_a_dry_run_says_where_the_hosts_are_from_and_include_chooses_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli.main(["--dry_run", "--include", "n2:1", "-q", "train.py"])
    told = capsys.readouterr().out
    assert "\nhosts: found in SLURM_JOB_NODELIST (Slurm)\n" in told
    assert "host n2 (node 0, by ssh), devices 1\n" in told
    assert "n1" not in told


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        (b"w[1-2] slots=1\n", 0, "2 ranks on 2 hosts"),
        (b"", 2, "standard input: no host in it"),
        (b"\xff slots=1", 2, "--hostfile -: standard input is not text (byte 0 is not UTF-8)"),
        (b"w slots=x\n", 2, "standard input:1: 'w slots=x': slots must be"),
    ],
)
def test_a_dash_is_standard_input(text: bytes, code: int, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", "-H", "-", "--dry_run", "t.py"],
        input=text,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == code
    assert told in (done.stdout + done.stderr).decode()

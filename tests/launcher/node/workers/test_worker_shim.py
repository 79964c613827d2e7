"""Processes that MPI or Slurm started: who they are, whether they are where they should
be, what they become.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import psutil
import pytest

from dslaunch.launcher.external.external_job import MAX_VALUE_BYTES, external_job, payload, start_command
from dslaunch.launcher.external.runner import EXTERNAL
from dslaunch.launcher.inputs.env_file import EnvEntry
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import select
from dslaunch.launcher.job.plan import Endpoint, Plan, plan_nodes, plan_program
from dslaunch.launcher.node.workers import worker_shim
from dslaunch.launcher.node.workers.preparation import Unprepared
from dslaunch.launcher.node.workers.worker_shim import (
    Misplaced,
    ProcessIdentity,
    check_place,
    given_devices,
    identify,
    read_external,
)
from dslaunch.launcher.wire.job import as_json
from tests.launcher.local_job import poll

SHOW = "import json, os, sys; json.dump({'argv': sys.argv[1:], 'cwd': os.getcwd(), **os.environ}, sys.stdout)"


def plan_of(
    folder: Path, *arguments: str, script: str = "show.py", hosts: str = "w0:2 w1:3", **program: bool
) -> Plan:
    words = [word.split(":") for word in hosts.split()]
    given = plan_program(script, arguments, python=sys.executable, **program)
    return Plan(
        nodes=plan_nodes(
            select(tuple(Host(name=name, slots=int(slots)) for name, slots in words)),
            given,
            local_names=frozenset(),
        ),
        master=Endpoint(address="w0", port=29500, is_port_fixed=True),
        program=given,
        cwd=str(folder),
        venv_script=None,
        environment=(
            EnvEntry(name="EXACT", value=('a b, "q" it\'s $X\n\udcff;`id`',), source="the shell"),
            EnvEntry(name="JOINED", value=("", "NODE_HAS", ":/x"), source="a file"),
        ),
        kill_grace_s=30.0,
        heartbeat_s=30.0,
    )


def start(plan: Plan, launcher: str, variables: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """What MPI or Slurm would start, with what it would say of the process."""
    env = {"PATH": os.environ["PATH"], "NODE_HAS": "of this node", **variables}
    return subprocess.run(
        start_command(sys.executable),
        env={**env, **dict(payload(plan, launcher, EXTERNAL[launcher]))},
        cwd="/",
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("launcher", "variables", "expected"),
    [
        ("openmpi", "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=5 OMPI_COMM_WORLD_LOCAL_RANK=1 "
         "OMPI_COMM_WORLD_LOCAL_SIZE=3", (3, 5, 1, 3)),
        ("openmpi", "PMIX_RANK=3", (3, None, None, None)),
        # Inside a batch job of Slurm every process has the batch step's SLURM_PROCID.
        ("openmpi", "OMPI_COMM_WORLD_RANK=3 PMIX_RANK=0 SLURM_PROCID=0 SLURM_LOCALID=0",
         (3, None, None, None)),
        ("mpich", "PMI_RANK=3 PMI_SIZE=5 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=3", (3, 5, 1, 3)),
        ("mpich", "PMIX_RANK=3 PALS_LOCAL_RANKID=1 MPI_LOCALRANKID=9", (3, None, 1, None)),
        ("impi", "PMI_RANK=3 PMI_SIZE=5 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=3", (3, 5, 1, 3)),
        ("mvapich", "MV2_COMM_WORLD_RANK=3 MV2_COMM_WORLD_SIZE=5 MV2_COMM_WORLD_LOCAL_RANK=1 "
         "MV2_COMM_WORLD_LOCAL_SIZE=3 PMI_RANK=8", (3, 5, 1, 3)),
        ("mvapich", "PMI_RANK=3 PMI_SIZE=5 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=3", (3, 5, 1, 3)),
        ("slurm", "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=5 SLURM_NTASKS=8 PMI_RANK=0",
         (3, 5, 1, None)),
        ("slurm", "SLURM_PROCID=3 SLURM_NTASKS=5", (3, 5, None, None)),
    ],
)  # fmt: skip
def test_each_launcher_has_its_own_variables(
    launcher: str, variables: str, expected: tuple[int | None, ...]
) -> None:
    job = external_job(plan_of(Path()), launcher, EXTERNAL[launcher])
    assert identify(job, dict(one.split("=") for one in variables.split())) == expected


@pytest.mark.parametrize("launcher", EXTERNAL)
def test_a_process_without_a_rank_says_so(launcher: str) -> None:
    job = external_job(plan_of(Path()), launcher, EXTERNAL[launcher])
    with pytest.raises(Misplaced, match=rf"--launcher={launcher} starts processes with .*_(RANK|PROCID)"):
        identify(job, {"RANK": "1", "PMI_RANK_": "1", "OMPI_COMM_WORLD_RANK": "x"})


@pytest.mark.parametrize(
    ("identity", "own_name", "message"),
    [
        (ProcessIdentity(3, 5, 1, 3), "w1", None),
        (ProcessIdentity(3, None, None, None), "w1", None),
        (ProcessIdentity(3, 5, 1, 3), "w1.example.com", None),
        (ProcessIdentity(3, 5, 1, 3), "a-name-that-is-not-in-the-plan", None),
        (ProcessIdentity(3, 4, 1, 3), "w1", "rank 3 has world size 4, but the plan for w1 says 5"),
        (ProcessIdentity(3, 5, 0, 3), "w1", "rank 3 has place on its host 0, but the plan for w1 says 1"),
        (
            ProcessIdentity(3, 5, 1, 2),
            "w1",
            "rank 3 has number of ranks on its host 2, but the plan for w1 says 3",
        ),
        (ProcessIdentity(3, 5, 1, 3), "w0", "rank 3 was started on w0, but the plan has it on w1"),
        (
            ProcessIdentity(3, 5, 1, 3),
            "W0.example.com",
            "rank 3 was started on w0, but the plan has it on w1",
        ),
    ],
)
def test_a_process_checks_that_it_is_where_the_plan_has_it(
    identity: ProcessIdentity,
    own_name: str,
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_shim.socket, "gethostname", lambda: own_name)
    job = external_job(plan_of(tmp_path), "openmpi", EXTERNAL["openmpi"])

    def check() -> None:
        check_place(identity, job, job.hosts[1], is_host=lambda name: worker_shim._is_own_name(name))

    if message is None:
        check()
    else:
        with pytest.raises(Misplaced, match=message):
            check()


def test_hosts_given_as_addresses_are_told_by_the_addresses_of_this_host(tmp_path: Path) -> None:
    job = external_job(plan_of(tmp_path, hosts="192.0.2.7:1 127.0.0.1:1"), "openmpi", EXTERNAL["openmpi"])
    check_place(ProcessIdentity(1, 2, 0, 1), job, job.hosts[1], is_host=worker_shim.is_this_host)
    with pytest.raises(
        Misplaced, match=r"rank 0 was started on 127\.0\.0\.1, but the plan has it on 192\.0\.2\.7"
    ):
        check_place(ProcessIdentity(0, 2, 0, 1), job, job.hosts[0], is_host=worker_shim.is_this_host)
    assert worker_shim.is_this_host("no-such-name.invalid") is None


@pytest.mark.parametrize(
    ("devices", "variables", "expected"),
    [
        ("0 1", {}, "0 1"),
        ("0 1", {"CUDA_VISIBLE_DEVICES": "4,5"}, "0 1"),  # not Slurm's
        ("0 1", {"CUDA_VISIBLE_DEVICES": "4,5", "SLURM_STEP_GPUS": "4,5"}, "4 5"),
        ("1", {"CUDA_VISIBLE_DEVICES": "4,5", "SLURM_JOB_GPUS": "4,5"}, "5"),
        ("0 1", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "SLURM_STEP_GPUS": "4,5"}, "GPU-a GPU-b"),
    ],
)
def test_slots_are_places_among_the_gpus_that_slurm_gave(
    devices: str, variables: dict[str, str], expected: str
) -> None:
    assert given_devices(devices.split(), variables) == expected.split()


def test_fewer_gpus_from_slurm_than_slots_are_refused() -> None:
    with pytest.raises(
        Unprepared, match=r"slot 1 is asked for, but Slurm gave this process only GPU 4; .*per-node"
    ):
        given_devices(["0", "1"], {"CUDA_VISIBLE_DEVICES": "4", "SLURM_STEP_GPUS": "4"})


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("openmpi", {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}),
        ("mpich", {"PMI_RANK": "3", "MPI_LOCALRANKID": "1"}),
        ("slurm", {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}),
    ],
)
def test_the_process_becomes_the_worker(launcher: str, variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    done = start(plan_of(tmp_path, "two words", "it's \udcff"), launcher, variables)
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    assert shown["argv"] == ["--local_rank=0", "two words", "it's \udcff"]
    assert shown["EXACT"] == 'a b, "q" it\'s $X\n\udcff;`id`'
    assert shown["JOINED"] == "of this node:/x"
    assert shown["cwd"] == str(tmp_path)
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE LOCAL_WORLD_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT"
    )
    assert [shown[name] for name in names.split()] == ["3", "0", "5", "3", "3", "1", "2", "w0", "29500"]
    assert not [name for name in shown if name.startswith("DSLAUNCH_")]
    assert variables.items() <= shown.items()


def test_the_worker_has_its_own_mig_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this process: the machine has no GPU."""
    (tmp_path / "show.py").touch()
    host = Host(name="localhost", slots=2, devices=("MIG-a", "MIG-b"))
    plan = plan_of(tmp_path)
    plan = plan._replace(nodes=plan_nodes(select((host,)), plan.program, local_names=frozenset()))
    job = read_external(dict(payload(plan, "openmpi", EXTERNAL["openmpi"])))
    monkeypatch.setattr(worker_shim, "count_accelerators", lambda: 2)
    executed: list[dict[bytes, bytes]] = []
    monkeypatch.setattr(worker_shim, "_exec", lambda argv, env: executed.append(env))
    monkeypatch.chdir(tmp_path)
    for rank in "01":
        worker_shim.become_worker(job, {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank})
    assert [env[b"CUDA_VISIBLE_DEVICES"] for env in executed] == [b"MIG-a", b"MIG-b"]


@pytest.mark.parametrize(
    ("script", "program", "argv"),
    [
        ("show.py", {"no_local_rank": True}, ["x"]),
        ("show", {"is_module": True}, ["--local_rank=0", "x"]),
        ("./run.sh", {"no_python": True}, ["--local_rank=0", "x"]),
    ],
)
def test_every_way_to_name_the_program(
    script: str, program: dict[str, bool], argv: list[str], tmp_path: Path
) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "run.sh").write_text(f'#!/bin/sh\nexec {sys.executable} show.py "$@"\n')
    (tmp_path / "run.sh").chmod(0o755)
    plan = plan_of(tmp_path, "x", script=script, **program)
    plan = plan._replace(
        environment=(EnvEntry(name="PYTHONPATH", value=(str(tmp_path),), source="the shell"),)
    )
    done = start(plan, "openmpi", {"OMPI_COMM_WORLD_RANK": "0"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["argv"] == argv


def test_the_worker_ignores_no_signal_that_python_ignores(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "SigIgn", "/proc/self/status", script="grep", no_python=True, no_local_rank=True)
    done = start(plan, "openmpi", {"OMPI_COMM_WORLD_RANK": "0"})
    ignored = int(done.stdout.split()[1], 16)
    assert not [signum for signum in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> (signum - 1) & 1]


def test_a_venv_script_chooses_the_python(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import os; print(os.environ['FROM_SCRIPT'])")
    (tmp_path / "venv.sh").write_text("FROM_SCRIPT=yes; export FROM_SCRIPT; echo noise\n")
    plan = plan_of(tmp_path)._replace(venv_script=str(tmp_path / "venv.sh"))
    done = start(plan, "slurm", {"SLURM_PROCID": "0"})
    assert (done.returncode, done.stdout) == (0, b"yes\n"), done.stderr


@pytest.mark.parametrize(("code", "expected"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 15)", -15)])
def test_exit_codes_and_signals_are_the_worker_s_own(code: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(f"import os, sys; {code}")
    assert start(plan_of(tmp_path), "openmpi", {"OMPI_COMM_WORLD_RANK": "0"}).returncode == expected


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        ("sys.exit(7)", 7, b"cmd=abort exitcode=7\n"),
        ("os.kill(os.getpid(), 9)", 137, b"cmd=abort exitcode=137\n"),
        ("sys.exit(0)", 0, b""),
    ],
)
def test_hydra_is_asked_to_abort_when_a_worker_fails(
    code: str, expected: int, words: bytes, tmp_path: Path
) -> None:
    (tmp_path / "show.py").write_text(f"import os, sys; {code}")
    read, write = os.pipe()
    env = {
        **os.environ,
        **dict(payload(plan_of(tmp_path), "mpich", EXTERNAL["mpich"])),
        "PMI_RANK": "0",
        "PMI_FD": str(write),
    }
    done = subprocess.run(start_command(sys.executable), env=env, pass_fds=[write], check=False)
    os.close(write)
    with open(read, "rb") as pipe:
        assert (done.returncode, pipe.read()) == (expected, words)


@pytest.mark.slow
def test_a_worker_ends_when_what_started_it_is_killed(tmp_path: Path) -> None:
    """As mpiexec's proxy on a host, whose death mpiexec itself does not see:
    its processes hold the connection open.
    """
    (tmp_path / "show.py").write_text(
        "import os, time\n"
        "open('new', 'w').write(str(os.getpid()))\n"
        "os.rename('new', 'pid')\n"
        "time.sleep(600)\n"
    )
    starter_code = "import subprocess, sys; subprocess.run(sys.argv[1:], pass_fds=[1])"
    env = {
        **os.environ,
        **dict(payload(plan_of(tmp_path), "mpich", EXTERNAL["mpich"])),
        "PMI_RANK": "0",
        "PMI_FD": "1",
    }
    words = [sys.executable, "-c", starter_code, *start_command(sys.executable)]
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL) as starter:
        poll((tmp_path / "pid").exists, "the worker")
        worker = psutil.Process(int((tmp_path / "pid").read_text()))
        starter.kill()
        poll(
            lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE,
            "the end of the worker",
        )


@pytest.mark.parametrize(
    ("variables", "script", "code", "message"),
    [
        ({}, "show.py", 3, "--launcher=openmpi starts processes with OMPI_COMM_WORLD_RANK or PMIX_RANK"),
        ({"OMPI_COMM_WORLD_RANK": "5"}, "show.py", 3, "rank 5 is not in the plan"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "gone.py", 2, "no script gone.py in "),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "DSLAUNCH_JOB_0": ""},
            "show.py",
            3,
            "the job did not arrive here whole",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0", "DSLAUNCH_JOB_0": "2:abc"}, "show.py", 3, "did not arrive here whole"),
    ],
)
def test_what_is_wrong_is_one_line(
    variables: dict[str, str], script: str, code: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "show.py").write_text("")
    plan = plan_of(tmp_path, script=script)
    env = {"PATH": os.environ["PATH"], **dict(payload(plan, "openmpi", EXTERNAL["openmpi"])), **variables}
    done = subprocess.run(start_command(sys.executable), env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stderr.startswith("dslaunch: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launcher": 7}, "launcher of the job is 7; it must be str"),
        ({"common": {}}, "the job has no cwd"),
    ],
)
def test_a_job_of_another_form_is_refused_in_one_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path)
    text = json.dumps(as_json(external_job(plan, "openmpi", EXTERNAL["openmpi"])) | change).encode()
    variables = dict(payload(plan, "openmpi", EXTERNAL["openmpi"])) | {
        "DSLAUNCH_JOB_0": f"1:{base64.b64encode(zlib.compress(text)).decode()}",
        "OMPI_COMM_WORLD_RANK": "0",
    }
    done = subprocess.run(start_command(sys.executable), env=variables, capture_output=True, check=False)
    assert done.returncode == 3
    assert re.fullmatch(rf"dslaunch: \S+: {re.escape(message)}\n", done.stderr.decode())


def test_a_program_that_cannot_run_is_127(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, script="./no-such-program", no_python=True)
    done = start(plan, "openmpi", {"OMPI_COMM_WORLD_RANK": "0"})
    assert done.returncode == 127
    assert b"cannot run ./no-such-program: No such file or directory" in done.stderr


def test_a_large_job_travels_in_pieces_below_the_kernel_s_limit(tmp_path: Path) -> None:
    noise = os.urandom(200_000).hex()
    plan = plan_of(tmp_path, noise, no_local_rank=True)
    variables = dict(payload(plan, "slurm", EXTERNAL["slurm"]))
    assert [name for name in variables if "JOB" in name] == [f"DSLAUNCH_JOB_{number}" for number in range(4)]
    assert all(len(value) < MAX_VALUE_BYTES + 10 for value in variables.values())
    assert all(value.isascii() and value.isprintable() for value in variables.values())
    assert read_external(variables) == external_job(plan, "slurm", EXTERNAL["slurm"])


def test_a_thousand_hosts_take_little_room(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, hosts=" ".join(f"worker-{number}:8" for number in range(1000)))
    assert sum(len(value) for _, value in payload(plan, "slurm", EXTERNAL["slurm"])) < 200_000

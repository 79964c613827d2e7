"""Programs that mpirun or srun has started join their job, or are refused; they never train apart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dslaunch
from dslaunch import ConfigError
from dslaunch.runtime.environment import read_environment
from dslaunch.runtime.started import join

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "146",
}
HNP = {"OMPI_MCA_orte_hnp_uri": "146.0;tcp://192.0.2.7,172.17.0.1:39957;tcp6://[fd00::2]:38087"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[08-10]",
}
ONE_HOST = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_LOCALID": "5", "SLURM_NODEID": "0"}
DAEMON = {"SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (3, 4, 1, 4, "127.0.0.1")),
        ({**OPENMPI, **HNP}, (3, 4, 1, 2, "192.0.2.7")),
        ({**OPENMPI, **HNP, "MASTER_ADDR": "n0"}, (3, 4, 1, 2, "n0")),
        ({**OPENMPI, **DAEMON, "MASTER_ADDR": "n0"}, (3, 4, 1, 2, "n0")),
        ({f"MV2_COMM_WORLD_{one}": "2" for one in ("SIZE", "LOCAL_SIZE")}
         | {f"MV2_COMM_WORLD_{one}": "1" for one in ("RANK", "LOCAL_RANK")}, (1, 2, 1, 2, "127.0.0.1")),
        (HYDRA, (1, 2, 1, 2, "127.0.0.1")),
        ({**HYDRA, **DAEMON, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, (1, 2, 1, 2, "127.0.0.1")),
        ({"PMI_RANK": "1", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4",
          "MASTER_ADDR": "n0"}, (1, 8, 1, 4, "n0")),
        (STEP, (5, 6, 1, 2, "gpu08")),
        ({**STEP, "PMI_RANK": "5", "PMI_SIZE": "6", "PMIX_RANK": "5"}, (5, 6, 1, 2, "gpu08")),
        ({**STEP, "SLURM_STEP_NODELIST": "a[2,4-5]-r[3-4],b1"}, (5, 6, 1, 2, "a2-r3")),
        ({**STEP, "SLURM_STEP_NODELIST": "node9,node1"}, (5, 6, 1, 2, "node9")),
        (ONE_HOST, (5, 6, 5, 6, "127.0.0.1")),
        ({**STEP, "WORLD_SIZE": "6"}, (5, 6, 1, 2, "gpu08")),
    ],
)  # fmt: skip
def test_a_process_that_mpi_or_slurm_has_started_has_its_place(
    environ: dict[str, str], place: tuple[object, ...]
) -> None:
    worker = read_environment(environ)
    assert worker.started is not None
    assert not worker.started.why_not
    places = (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size)
    assert (*places, worker.started.master) == place
    assert worker.is_launched


@pytest.mark.parametrize(
    "environ",
    [
        BATCH,
        {**BATCH, "SLURM_STEP_ID": "4294967291"},
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "4"},
        {**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {**OPENMPI, "RANK": "0", "WORLD_SIZE": "1"},
        {**STEP, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    ],
)
def test_a_process_that_is_one_of_no_others_opens_no_port(environ: dict[str, str]) -> None:
    worker = read_environment(environ)
    assert (worker.rank, worker.world_size, worker.is_launched, worker.started) == (0, 1, False, None)


def test_variables_of_a_launcher_go_before() -> None:
    worker = read_environment({**OPENMPI, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert (worker.rank, worker.world_size, worker.local_rank, worker.started) == (1, 2, 1, None)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (OPENMPI, "OMPI_COMM_WORLD_RANK=3 says that this is one of 4 processes of a job, and they are on "
         "several hosts: nothing says where rank 0 is; start it with dslaunch --launcher openmpi, or set "
         "MASTER_ADDR to the host of rank 0"),
        ({**OPENMPI, **HNP, "OMPI_COMM_WORLD_RANK": "0"}, "nothing says where rank 0 is"),
        ({**HYDRA, "PMI_SIZE": "4"}, "dslaunch --launcher mpich, or set MASTER_ADDR to the host of rank 0"),
        ({**STEP, "SLURM_DISTRIBUTION": "arbitrary"}, "nothing says where rank 0 is"),
        ({**STEP, "SLURM_PTY_PORT": "4"}, "a program in the terminal of one (srun --pty) would wait for the "
         "others for ever; start it with dslaunch --launcher slurm, or set RANK, WORLD_SIZE and LOCAL_RANK"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 is set but PMI_SIZE is not"),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE='x' in the environment: must be"),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4, of 4 processes: must be from 0"),
        ({**OPENMPI, "RANK": "2"}, "RANK=2 is set, but OMPI_COMM_WORLD_RANK=3 is one of 4 processes; set W"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_joined_is_refused_with_what_to_write(
    environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        dslaunch.init_distributed()
    assert message in str(refused.value)


def test_a_program_that_forbids_discovery_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HYDRA.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"PMI_RANK=1 .* auto_mpi_discovery=False does not let it join"):
        dslaunch.init_distributed(auto_mpi_discovery=False)


def test_the_port_is_the_job_s_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def port_of(environ: dict[str, str], given: int = 29500) -> int:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        started = read_environment(environ).started
        assert started is not None
        join(started, port=given)
        return int(dslaunch.runtime.started.os.environ["MASTER_PORT"])

    ports = [port_of({**STEP, "SLURM_PROCID": rank, "SLURM_NODEID": rank}) for rank in "012"]
    assert len(set(ports)) == 1
    assert 20000 <= ports[0] < 32000
    assert port_of({**STEP, "SLURM_STEP_ID": "1"}) != ports[0]
    assert port_of(STEP, 4000) == 4000


TRAIN = """
import json, os, sys, torch, dslaunch
import torch.distributed as dist
model = torch.nn.Linear(4, 2)
engine, *_ = dslaunch.initialize(
    model=model, config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
)
total = torch.ones(1)
dist.all_reduce(total)
engine.save_checkpoint(sys.argv[1])
print(json.dumps([dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]), total.item()]))
"""
# What decides it, without torch; for Open MPI launcher/jobs/test_started_by_others.py has a training.
PLACE = """
import json
from dslaunch.runtime.environment import read_environment
one = read_environment()
print(json.dumps([one.rank, one.world_size, one.local_rank, one.started.master]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mpirun", "program", "last"), [("mpirun.openmpi", PLACE, '"127.0.0.1"'), ("mpirun.mpich", TRAIN, "2.0")]
)
def test_what_mpirun_starts_is_one_training(mpirun: str, program: str, last: str, tmp_path: Path) -> None:
    if shutil.which(mpirun) is None:
        pytest.skip(f"{mpirun} is not installed")
    (tmp_path / "train.py").write_text(program)
    words = ["--allow-run-as-root", "--oversubscribe"] if mpirun == "mpirun.openmpi" else []
    done = subprocess.run(
        [mpirun, *words, "-np", "2", sys.executable, "train.py", "saved"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", f"[0, 2, 0, {last}]", f"[1, 2, 1, {last}]"]

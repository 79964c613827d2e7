"""Trainings on several hosts that mpirun and srun start themselves, without dslaunch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launcher.backends.programs import need, start_slurm

pytestmark = pytest.mark.slow

PROGRAM = """
import os, torch, dslaunch
import torch.distributed as dist
dslaunch.init_distributed("gloo", verbose=False)
total = torch.full((1,), 1.0 + dist.get_rank())
dist.all_reduce(total)
print(f"{os.uname().nodename} rank {dist.get_rank()} of {dist.get_world_size()}, local rank "
      f"{os.environ.get('LOCAL_RANK')}: {total.item():g}", flush=True)
"""
ALL = [f"node{1 + rank // 2} rank {rank} of 4, local rank {rank % 2}: 10" for rank in range(4)]


def words_of(stdout: str) -> list[str]:
    return sorted(line for line in stdout.splitlines() if " rank " in line)


def test_srun_starts_one_training_and_a_batch_script_one_process(lab: Lab, folder: Path) -> None:
    need("slurm")
    (folder / "train.py").write_text(PROGRAM)
    env, run = start_slurm(lab), [sys.executable, "train.py"]

    def done(*words: str) -> str:
        found = lab.head.run(words, env=env, cwd=folder, timeout=120)
        assert found.returncode == 0, found.stderr + found.stdout
        return found.stdout

    assert words_of(done("srun", "-N2", "--ntasks-per-node=2", *run)) == ALL
    one_host = done("srun", "-N1", "-n2", "-w", "node3", *run)
    assert words_of(one_host) == [f"node3 rank {rank} of 2, local rank {rank}: 3" for rank in range(2)]
    (folder / "job.sh").write_text(f"#!/bin/sh\n{' '.join(run)}\nsrun {' '.join(run)}\n")
    done("sbatch", "--wait", "-N2", "--ntasks-per-node=2", "-w", "node[1-2]", "-o", "said", "job.sh")
    alone = "node1 rank 0 of 1, local rank None: 1"
    assert words_of((folder / "said").read_text()) == [alone, *ALL]
    alone = "head rank 0 of 1, local rank None: 1"
    assert words_of(done("salloc", "-N2", "-n4", *run)) == [alone]


def test_open_mpi_starts_one_training_from_the_host_of_rank_0(lab: Lab, folder: Path) -> None:
    need("openmpi")
    (folder / "train.py").write_text(PROGRAM)
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--map-by", "slot", "-n", "4", "--host"]
    run = [sys.executable, "train.py"]
    found = lab.host("node1").run([*mpirun, "node1:2,node2:2", *run], cwd=folder, timeout=120)
    assert found.returncode == 0, found.stderr
    assert words_of(found.stdout) == ALL
    elsewhere = lab.head.run([*mpirun, "node1:2,node2:2", *run], cwd=folder, timeout=120)
    assert "OMPI_COMM_WORLD_RANK=0 says that this is one of 4 processes" in elsewhere.stderr
    assert elsewhere.returncode == 2
    given = lab.head.run(
        [*mpirun, "node1:2,node2:2", "-x", "MASTER_ADDR=node1", *run], cwd=folder, timeout=120
    )
    assert words_of(given.stdout) == ALL, given.stderr

"""Processes on several hosts that mpirun and srun start themselves, without dslaunch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launcher.backends.programs import need, run_batch, start_slurm

pytestmark = pytest.mark.slow

TRAIN = """
import os, torch, dslaunch
import torch.distributed as dist
dslaunch.init_distributed("gloo", verbose=False)
total = torch.full((1,), 1.0 + dist.get_rank())
dist.all_reduce(total)
print(f"{os.uname().nodename} rank {dist.get_rank()} of {dist.get_world_size()}, local rank "
      f"{os.environ.get('LOCAL_RANK')}: {total.item():g}", flush=True)
"""
# Where it would join the others, without torch.
PLACE = """
import os
from dslaunch.runtime.environment import read_environment
from dslaunch.runtime.started import join
one, where = read_environment(), None
if one.started:
    where = one.started.why_not
    if not where:
        join(one.started, port=29500)
        where = f"{os.environ['MASTER_ADDR']} by port {os.environ['MASTER_PORT']}"
place = f"rank {one.rank} of {one.world_size}, local rank {one.local_rank}"
print(f"{os.uname().nodename} {place}: {where}", flush=True)
"""
TRAINED = [f"node{1 + rank} rank {rank} of 2, local rank 0: 3" for rank in range(2)]


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "train.py").write_text(TRAIN)
    (folder / "place.py").write_text(PLACE)
    return folder


def words_of(stdout: str) -> list[str]:
    return sorted(line for line in stdout.splitlines() if " rank " in line)


def places_of(stdout: str) -> list[str]:
    """Without the port, on which all agree."""
    found = [line.partition(" by port ") for line in words_of(stdout)]
    assert len({port for _, _, port in found if port}) <= 1, found
    return [place for place, _, _ in found]


def test_srun_starts_one_training_and_a_batch_script_one_process(lab: Lab, folder: Path) -> None:
    need("slurm")
    env = start_slurm(lab)
    train, place = [sys.executable, "train.py"], [sys.executable, "place.py"]

    def done(*words: str) -> str:
        found = lab.head.run(words, env=env, cwd=folder, timeout=120)
        assert found.returncode == 0, found.stderr + found.stdout
        return found.stdout

    assert words_of(done("srun", "-N2", "-n2", *train)) == TRAINED
    one_host = done("srun", "-N1", "-n2", "-w", "node3", *place)
    assert places_of(one_host) == [
        f"node3 rank {rank} of 2, local rank {rank}: 127.0.0.1" for rank in range(2)
    ]
    (folder / "job.sh").write_text(f"#!/bin/sh\n{' '.join(place)}\nsrun {' '.join(place)}\n")
    words = ("-N2", "--ntasks-per-node=2", "-w", "node[1-2]", "-o", "said", "job.sh")
    run_batch(lab, env, folder, *words)
    of_step = [f"node{1 + rank // 2} rank {rank} of 4, local rank {rank % 2}: node1" for rank in range(4)]
    alone = "rank 0 of 1, local rank 0: None"
    assert places_of((folder / "said").read_text()) == [f"node1 {alone}", *of_step]
    assert places_of(done("salloc", "-N2", "-n4", *place)) == [f"head {alone}"]


def test_what_open_mpi_starts_meets_on_the_host_of_rank_0(lab: Lab, folder: Path) -> None:
    need("openmpi")
    hosts = ["--map-by", "slot", "--host", "node1:2,node2:1"]
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", *hosts]

    def done(host: str, *words: str) -> list[str]:
        found = lab.host(host).run([*mpirun, *words, sys.executable, "place.py"], cwd=folder, timeout=120)
        assert found.returncode == 0, found.stderr
        return places_of(found.stdout)

    places = [f"node{1 + rank // 2} rank {rank} of 3, local rank {rank % 2}" for rank in range(3)]
    assert done("node1") == [f"{one}: {lab.host('node1').address}" for one in places]
    assert f"{places[0]}: they are on several hosts: nothing says where rank 0 is" in done("head")
    assert done("head", "-x", "MASTER_ADDR=node1") == [f"{one}: node1" for one in places]

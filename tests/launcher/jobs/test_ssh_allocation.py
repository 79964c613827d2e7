"""Jobs in real allocations of Slurm, which alone name the hosts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.lab import Lab, procfs
from tests.launcher.backends.programs import left_over, need, run_batch, start_slurm

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "launch" / "slurm.md"
TELL = "import os\nprint('rank', os.environ['RANK'], os.uname().nodename, flush=True)\n"
DSLAUNCH = f"{sys.executable} -m dslaunch --no_local_rank"
STARTED = (  # what starts dslaunch, its options, and the hosts of ranks 0, 1 ...
    ("salloc -Q -w node1,node2 -N2 --ntasks-per-node=2", "--exclude node1:0", "node1 node2 node2"),
    ("salloc -Q -w node1,node2 -N2 -n3", "--launcher slurm", "node1 node1 node2"),
    ("salloc -Q -w node1,node2,node3 -N3 srun -N2 -n2", "--no_ssh --master_addr=node1", "node1 node2"),
)


def test_the_hosts_of_an_allocation_are_found(lab: Lab) -> None:
    need("slurm")
    env = start_slurm(lab)
    folder = lab.shared / "allocation"
    folder.mkdir()
    (folder / "tell.py").write_text(TELL)
    for starter, options, hosts in STARTED:
        done = lab.head.run(["sh", "-c", f"cd {folder}; {starter} {DSLAUNCH} {options} tell.py"], env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        ranks = sorted(line[line.index("rank ") :] for line in done.stdout.splitlines() if "rank " in line)
        wanted = [f"rank {rank} {host}" for rank, host in enumerate(hosts.split())]
        assert ranks == wanted, done.stdout + done.stderr
        assert "hosts from Slurm, SLURM_" in done.stdout + done.stderr
    assert procfs.wait_until(lambda: not left_over(lab), timeout_s=15), left_over(lab)


def test_the_script_of_the_guide_runs_in_a_batch_job(lab: Lab) -> None:
    """As printed, but for GPUs, which these hosts have none of: two tasks stand for them."""
    need("slurm")
    env = start_slurm(lab)
    folder = lab.shared / "batch"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    (folder / "train.py").write_text(TELL)
    (script,) = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", GUIDE.read_text(), re.DOTALL)
    given = {"--gpus-per-node=8": "--ntasks-per-node=2", "--ntasks-per-node=1": "--time=1", "64": "1"}
    for printed, here in given.items():
        assert printed in script
        script = script.replace(printed, here)
    (folder / "train.sbatch").write_text(script)
    run_batch(lab, env, folder, "train.sbatch")
    (output,) = folder.glob("train-*.out")
    ranks = sorted(line[line.index("rank ") :] for line in output.read_text().splitlines() if "rank " in line)
    assert ranks == [f"rank {rank} node{rank // 2 + 1}" for rank in range(4)], output.read_text()
    assert sorted((folder / "logs").rglob("*rank*")), "no log files"

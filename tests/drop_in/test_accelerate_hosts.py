"""`accelerate launch` on two hosts, by each of the ways that it has for DeepSpeed: real hosts, real sshd."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dslaunch import drop_in
from tests.lab import Host, Lab
from tests.launcher.backends.programs import need, start_slurm

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(180)]

SCRIPT = """
import os, sys
from pathlib import Path
import deepspeed
import deepspeed.comm as dist
import torch
dist.init_distributed(dist_backend="gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
names = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_MIXED_PRECISION")
Path(f"rank-{dist.get_rank()}").write_text(repr((
    os.uname().nodename, deepspeed.__version__, dist.get_world_size(), total.item(), sys.argv[-1:],
    [os.environ.get(name) for name in names],
)))
torch.distributed.destroy_process_group()
"""
ENV = {
    "PYTHONPATH": drop_in.FOLDER,
    "PATH": (
        f"{drop_in.BIN}:{Path(sys.executable).parent}:"
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    ),
    drop_in.PYTHON_VARIABLE: sys.executable,
    "OMP_NUM_THREADS": "1",
}


class Launch:
    """One launcher's way, in a folder that all hosts share."""

    def __init__(self, lab: Lab, folder: Path, launcher: str) -> None:
        self._lab, self._folder, self._launcher = lab, folder, launcher
        self._env = ENV | (start_slurm(lab) if launcher == "slurm" else {})

    def run(self, host: Host, *more: str) -> subprocess.CompletedProcess[str]:
        words = ["accelerate", "launch", "--use_deepspeed", "--num_machines=2", "--num_processes=2"]
        words += [
            "--main_process_port=29600",
            "--mixed_precision=bf16",
            "--dynamo_backend=no",
            "--zero_stage=2",
        ]
        words += ["--deepspeed_hostfile=hosts", f"--deepspeed_multinode_launcher={self._launcher}"]
        return host.run([*words, *more, "script.py", "a b"], env=self._env, cwd=self._folder, timeout=120)

    def check(self, done: list[subprocess.CompletedProcess[str]]) -> None:
        assert [one.returncode for one in done] == [0] * len(done), [one.stdout + one.stderr for one in done]
        facts = (drop_in.VERSION, 2, 3.0, ["a b"], ["true", "2", "bf16"])
        for rank in range(2):
            assert (self._folder / f"rank-{rank}").read_text() == repr((f"node{rank + 1}", *facts))


@pytest.fixture
def launch(request: pytest.FixtureRequest, lab: Lab) -> Launch:
    launcher: str = request.param
    if launcher == "slurm":
        need(launcher)
    folder = lab.shared / f"accelerate-{launcher}"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    return Launch(lab, folder, launcher)


@pytest.mark.parametrize(
    "launch", ["pdsh", pytest.param("slurm", marks=pytest.mark.exhaustive)], indirect=True
)
def test_one_command_starts_both_hosts_by_the_command_deepspeed(launch: Launch, lab: Lab) -> None:
    launch.check([launch.run(lab.head, "--machine_rank=0")])


@pytest.mark.parametrize(
    "launch", ["nossh", pytest.param("standard", marks=pytest.mark.exhaustive)], indirect=True
)
def test_a_command_on_each_host_starts_its_ranks(launch: Launch, lab: Lab) -> None:
    node1 = lab.host("node1")

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        words = (f"--machine_rank={rank}", f"--main_process_ip={node1.address}", "--same_network")
        return launch.run(lab.host(f"node{rank + 1}"), *words)

    with ThreadPoolExecutor(2) as both:
        launch.check(list(both.map(run, range(2))))

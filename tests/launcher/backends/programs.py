"""The programs that the tests of this folder run, and a small Slurm cluster of lab hosts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.lab import Lab, procfs
from tests.launcher.command import TIMEOUT_S

NEEDED = {
    "openmpi": ("mpirun.openmpi",),
    "mpich": ("mpirun.mpich",),
    "slurm": ("srun", "slurmctld", "slurmd", "munged"),
}
SBIN = "/usr/local/sbin:/usr/sbin:/sbin:"
DAEMONS = ("munged", "slurmctld", "slurmd", "slurmscriptd", ": slurmscriptd", "slurmstepd")

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.sock
CryptoType=crypto/munge
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=2
SchedulerParameters=sched_interval=1
NodeName={nodes} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def need(launcher: str) -> None:
    """Skip a test whose programs are not installed, or fail it where the lab is required."""
    path = SBIN + os.environ.get("PATH", "")
    missing = [name for name in NEEDED[launcher] if shutil.which(name, path=path) is None]
    if missing and os.environ.get("DSLAUNCH_LAB") == "required":
        pytest.fail(f"DSLAUNCH_LAB=required, but {', '.join(missing)} is not installed", pytrace=False)
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


def start_slurm(lab: Lab) -> dict[str, str]:
    """A cluster of all nodes, with its controller on the head; returns the variables for its commands.

    It ends with the test: its daemons are processes like any other.
    """
    conf = lab.shared / "slurm.conf"
    conf.write_text(SLURM_CONF.format(nodes=",".join(node.name for node in lab.nodes)))
    for host in lab.hosts:
        # Each host has a folder /run of its own. The key is the same for all of them.
        script = (
            "umask 077; rm -rf /run/munge* /tmp/slurm*; mkdir /tmp/slurmctld /tmp/slurmd; seq 300 > "
            "/run/munge.key; exec munged --force --key-file=/run/munge.key --socket=/run/munge.sock "
            "--pid-file=/run/munged.pid --log-file=/var/log/munged.log --seed-file=/run/munged.seed"
        )
        host.run(["sh", "-c", script], check=True)
    lab.head.run(["slurmctld", "-f", str(conf)], check=True)
    for node in lab.nodes:
        node.run(["slurmd", "-f", str(conf)], check=True)
    env = {"SLURM_CONF": str(conf)}

    def is_ready() -> bool:
        found = lab.head.run(["sinfo", "--noheader", "--Node", "--format=%T"], env=env).stdout.split()
        return found == ["idle"] * len(lab.nodes)

    assert procfs.wait_until(is_ready, timeout_s=TIMEOUT_S), lab.head.run(["sinfo"], env=env).stdout
    return env


def run_batch(lab: Lab, env: dict[str, str], folder: Path, *words: str) -> None:
    """Run a batch job to its end. `sbatch --wait` looks seldom whether it has ended."""
    done = lab.head.run(["sbatch", *words], env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    number = done.stdout.split()[-1]
    show = ["scontrol", "show", "job", "--oneliner", number]
    state: list[str] = []

    def has_ended() -> bool:
        state[:] = [one for one in lab.head.run(show, env=env).stdout.split() if one.startswith("JobState=")]
        return state not in (["JobState=PENDING"], ["JobState=RUNNING"], ["JobState=COMPLETING"])

    assert procfs.wait_until(has_ended, timeout_s=TIMEOUT_S), state
    assert state == ["JobState=COMPLETED"]


def left_over(lab: Lab) -> list[str]:
    """What is left of a job on any host; Slurm's own daemons are not."""
    return [
        f"{host}: {process.argv}"
        for host, process in lab.processes()
        if not Path(process.argv.partition(" ")[0]).name.startswith(DAEMONS)
        and not process.argv.startswith(DAEMONS)
    ]

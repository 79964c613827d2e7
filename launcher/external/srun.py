"""Slurm's srun: the command line for a plan.

Every process is placed by name, in the plan's order (`--distribution=arbitrary`), so hosts may have unequal
numbers of ranks. Inside an allocation the hosts must be in it; outside srun asks for one. Further requests to
Slurm (GPUs, CPUs, time) are for --launcher_args: the worker shim decides which GPU numbers of the allocation
a worker uses.
"""

from __future__ import annotations

import re
import shutil
import signal

from ..errors import EXIT_HOST, LaunchError
from ..job.plan import Plan
from ..job.verdict import signal_name
from .external import HOSTFILE, External
from .rank_start import RankStart

_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}
_TASK_ENDED = re.compile(
    r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[0-9,-]+): "
    r"(?:Exited with exit code (?P<code>[0-9]+)|(?P<signal>[A-Z][^()]*?)(?: \(core dumped\))?)\n?"
)
_HINT = "write the nodes of the allocation into one: scontrol show hostnames | sed 's/$/ slots=8/' > hosts"


def find_srun(is_needed: bool = True) -> str:
    """Return the path of srun. Errors: LaunchError if it must be on this machine and is not."""
    if is_needed and shutil.which("srun") is None:
        raise LaunchError(
            "--launcher=slurm: srun is not installed on this machine; start on a login node of the cluster, "
            "or apt-get install slurm-client",
            exit_code=EXIT_HOST,
        )
    return "srun"


def refuse_no_hosts(plan: Plan) -> None:
    """Errors: LaunchError if no hostfile named the hosts."""
    if [node.host.name for node in plan.nodes] == ["localhost"]:
        raise LaunchError(f"--launcher=slurm needs a hostfile with the names of Slurm's nodes; {_HINT}")


def srun_command(start: RankStart) -> tuple[tuple[str, ...], str]:
    """Return the command, and the text of the file that SLURM_HOSTFILE must name: the host of every rank, one
    per line.

    The command ends all workers at the first that fails, and at one Ctrl-C. srun passes all variables on.
    """
    argv = (
        start.program,
        "-n",
        str(start.num_ranks),
        f"--nodes={len(start.slots)}",
        f"--nodelist={HOSTFILE}",
        "--distribution=arbitrary",
        "--kill-on-bad-exit=1",
        "--quit-on-interrupt",
        *start.launcher_args,
        "--export=ALL",
    )
    return (*argv, *start.words), start.hosts_by_rank


def failure_in(line: str) -> tuple[str, int] | None:
    """Return the failure of a task in a line of srun's stderr: a sentence, and the code; 128 + n if signal n
    ended it.

    srun's own exit code is the highest of all, which is that of SIGTERM: srun terminates the other tasks
    after the first failure.
    """
    match = _TASK_ENDED.fullmatch(line)
    if match is None:
        return None
    where = f"rank {match['ranks']} on {match['host']}"
    if match["code"]:
        return f"{where} exited with code {match['code']}", int(match["code"])
    number = _SIGNALS.get(match["signal"])
    return None if number is None else (f"{where} was killed by {signal_name(number)}", 128 + number)


SLURM = External(
    find_program=find_srun,
    command=srun_command,
    says_who=(("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), ()),
    settings=(("SLURM_HOSTFILE", HOSTFILE),),
    tells_failures=failure_in,
    how_to_restart=(
        "Slurm start the job again: `scontrol requeue $SLURM_JOB_ID` in the batch script, after a failure"
    ),
    check=refuse_no_hosts,
    gives_devices=True,
)

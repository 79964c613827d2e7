"""The tools that start something on many hosts: the command line of each, for one and the same job.

Every function takes a Job and gives the command to type on the launching host. The peers run as they come:
DeepSpeed is the unmodified package in the folder deepspeed/ of the virtual environment, with its defaults.
"""

from __future__ import annotations

import importlib.machinery
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

DSLAUNCH = str(Path(sys.executable).with_name("dslaunch"))
DEEPSPEED_FOLDER = Path(sys.prefix) / "deepspeed"
DEEPSPEED_NEEDS = ("cpuinfo", "einops", "msgpack", "tqdm")  # packages that `make setup` puts beside it
OPENMPI = "mpirun.openmpi"
MANY = 10**6
REPORT = "report.json"
STATIC_PORT = 29511  # differs from the port of launchers that choose for themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`program` in `folder`, once for each of `num_slots` slots of every host; Python ends in .py."""

    hosts: tuple[str, ...]
    folder: Path
    program: str
    num_slots: int = 1

    @property
    def num_workers(self) -> int:
        return len(self.hosts) * self.num_slots


class Command(NamedTuple):
    """The words of a command, and what is added to its environment."""

    words: list[str]
    env: dict[str, str] = {}  # noqa: RUF012 # never written to


class Tool(NamedTuple):
    """`why_missing` is empty if the tool can be used; beyond `max_hosts` it takes too long to be measured."""

    name: str
    command: Callable[[Job], Command]
    why_missing: str
    max_hosts: int


# ---- the same job in the words of each


def dslaunch(job: Job) -> Command:
    return Command([DSLAUNCH, "-q", "-H", _hostfile(job), *_program(job)])


def dslaunch_with_report(job: Job) -> Command:
    return Command([DSLAUNCH, "-q", f"--report={REPORT}", "-H", _hostfile(job), *_program(job)])


def deepspeed(job: Job) -> Command:
    # --force_multi: one host too is reached through pdsh
    return deepspeed_command("-q", "--force_multi", "-H", _hostfile(job), *_program(job))


def deepspeed_command(*words: str) -> Command:
    """DeepSpeed hands PYTHONPATH on to the hosts by itself."""
    program = [sys.executable, str(DEEPSPEED_FOLDER / "bin" / "deepspeed")]
    return Command([*program, *words], {"PYTHONPATH": str(DEEPSPEED_FOLDER)})


def pdsh(job: Job) -> Command:
    return Command(["pdsh", "-R", "ssh", "-f", "1024", "-w", ",".join(job.hosts), _in_folder(job)])


def openssh(job: Job) -> Command:
    each = f"ssh -o BatchMode=yes {{}} '{_in_folder(job)}'"
    return Command(["sh", "-c", f"printf '%s\\n' {' '.join(job.hosts)} | xargs -P 64 -I{{}} {each}"])


def pool_of_true(job: Job) -> Command:
    """A pool of threads with paramiko, which runs `true` in place of the program."""
    return _pool("true", job)


def pool_of_python(job: Job) -> Command:
    """The same with a Python that does nothing: an agent in Python takes at least that."""
    return _pool(f"exec {sys.executable} -I -S -c pass", job)


def _pool(command: str, job: Job) -> Command:
    return Command([sys.executable, str(Path(__file__).with_name("paramiko_pool.py")), command, *job.hosts])


def mpirun(job: Job) -> Command:
    words = ["--allow-run-as-root", "--host", ",".join(job.hosts), "-n", str(len(job.hosts))]
    return Command([OPENMPI, *words, "--mca", "btl", "tcp,self", job.program])


def torchrun(job: Job) -> Command:
    """Start torchrun by hand, as its manual says: the same command on every host, all at once."""
    words = (
        f"{sys.executable} -m torch.distributed.run --nnodes {len(job.hosts)} "
        f"--nproc-per-node {job.num_slots}"
    )
    where = f"--master-addr {job.hosts[0]} --master-port {STATIC_PORT}"
    each = [
        f"ssh -o BatchMode=yes {host} 'cd {job.folder} && {words} --node-rank {rank} {where} {job.program}' &"
        for rank, host in enumerate(job.hosts)
    ]
    return Command(["sh", "-c", f"{' '.join(each)} wait"])


def dslaunch_local(job: Job, options: tuple[str, ...] = ()) -> Command:
    words = ["-q", "--launcher=local", f"--num_gpus={job.num_slots}", *options]
    return Command([DSLAUNCH, *words, job.program])


def deepspeed_local(job: Job) -> Command:
    return deepspeed_command("-q", f"--num_gpus={job.num_slots}", job.program)


def _hostfile(job: Job) -> str:
    path = job.folder / "hosts"
    path.write_text("".join(f"{name} slots={job.num_slots}\n" for name in job.hosts))
    return path.name


def _program(job: Job) -> list[str]:
    is_python = job.program.endswith(".py")
    return [job.program] if is_python else ["--no_python", "--no_local_rank", job.program]


def _in_folder(job: Job) -> str:
    return f"cd {job.folder} && {job.program}"


# ---- which of them there are


def why_no_deepspeed() -> str:
    """Return why DeepSpeed cannot run; empty if it and its needs are there."""
    if not (DEEPSPEED_FOLDER / "bin" / "deepspeed").exists():
        return (
            f"no DeepSpeed in {DEEPSPEED_FOLDER.name}/ of the virtual environment; `make setup` puts it there"
        )
    finder = importlib.machinery.PathFinder
    missing = [
        name for name in DEEPSPEED_NEEDS if finder.find_spec(name, [str(DEEPSPEED_FOLDER), *sys.path]) is None
    ]
    return f"DeepSpeed needs {', '.join(missing)}; `make setup` installs it" if missing else ""


def curve_tools() -> tuple[Tool, ...]:
    """Tools whose time is measured against the number of hosts, ours first."""
    no_deepspeed = why_no_deepspeed() or _why_not("pdsh")
    return (
        Tool("dslaunch", dslaunch, "", MANY),
        Tool("deepspeed + pdsh", deepspeed, no_deepspeed, 16),  # it needs more than 10 s there
        Tool("pdsh", pdsh, _why_not("pdsh"), MANY),
        Tool("mpirun", mpirun, _why_not(OPENMPI), MANY),
        Tool("paramiko: true", pool_of_true, "", MANY),
        Tool("paramiko: python", pool_of_python, "", MANY),
        Tool("ssh + xargs", openssh, _why_not("ssh") or _why_not("xargs"), MANY),
    )


def _why_not(program: str) -> str:
    return "" if shutil.which(program) else f"{program} is not installed"

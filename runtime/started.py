"""The place of this process in a job that mpirun or srun has started without a launcher of training jobs.

Variables of MPI or Slurm tell such a program its rank, and leave open where rank 0 listens: on one host
that is 127.0.0.1; of several hosts Slurm names the first, and Open MPI the one on which mpirun runs.

[Note: Processes of Slurm that are no rank]
A script of sbatch, a shell of salloc and what is started from them have SLURM_PROCID=0 and SLURM_NTASKS, too,
and are one process. Only srun sets SLURM_STEP_NUM_TASKS. Under mpirun, Slurm's variables are those of MPI's
daemons, which it may start by srun: MPI's go first.
Source: Slurm 22.05, srun(1), "OUTPUT ENVIRONMENT VARIABLES"; Open MPI 4.1; MPICH 4.0, hydra.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import ConfigError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # default of DeepSpeed's arguments: it was not chosen
_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below those that Linux gives to connections
_FIELDS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_STEP = "SLURM_STEP_NUM_TASKS"
_HNP = re.compile(r"[0-9]+\.[0-9]+;(?:[^;]*;)*?tcp://([0-9.]+)[,:].*")


class _Names(NamedTuple):
    """The variables of one way to start, each with those that serve in its place."""

    kind: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...]  # together they name the job; empty: the starter's process does


def _world(kind: str, prefix: str, *job: str) -> _Names:
    rank, size, local_rank, local_size = ((f"{prefix}_COMM_WORLD_{one}",) for one in _FIELDS)
    return _Names(kind, rank, size, local_rank, local_size, job)


_OPENMPI = _world("openmpi", "OMPI", "PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri")
_MVAPICH = _world("mvapich", "MV2")
_SLURM = _Names(
    "slurm", ("SLURM_PROCID",), (_STEP,), ("SLURM_LOCALID",), (), ("SLURM_JOB_ID", "SLURM_STEP_ID")
)
_HYDRA = _Names(
    "mpich",
    ("PMI_RANK", "PMIX_RANK"),
    ("PMI_SIZE",),
    ("PALS_LOCAL_RANKID", "MPI_LOCALRANKID"),
    ("PALS_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ("PALS_APID",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedProcess:
    """One process of a job of several that MPI or Slurm has started."""

    who: str  # the variable that says so, as OMPI_COMM_WORLD_RANK=1
    kind: str  # its name in dslaunch --launcher
    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str  # equal on all ranks, and another in each job of this host; empty: not known on all of them
    master: str  # host of rank 0; empty: not known
    why_not: str = ""  # the job cannot be joined
    instead: str = ""  # another way to start


def find_started(env: Mapping[str, str]) -> StartedProcess | None:
    """Read what MPI or Slurm says of this process; None if it is one of no others.

    Errors: ConfigError for a rank without the number of ranks, or values that are none
    """
    for names in _order(env):
        given = _first(env, names.rank)
        if given is None:
            continue
        if _first(env, names.size) is None:
            raise ConfigError(
                f"{given} is set but {names.size[0]} is not: how many processes this is one of is not known; "
                "start with dslaunch, or set RANK, WORLD_SIZE and LOCAL_RANK; for a process that trains "
                "alone RANK=0 and WORLD_SIZE=1"
            )
        process = _started(env, names, given)
        return process if process.size > 1 else None
    return None


def _order(env: Mapping[str, str]) -> tuple[_Names, ...]:
    """The ways to start, the innermost first. Slurm may speak PMI, too, and says more then."""
    slurm = (_SLURM,) if _STEP in env else ()
    of_slurm = (env.get("SLURM_PROCID"), env.get(_STEP))
    is_hydra = "PMI_RANK" in env and (env["PMI_RANK"], env.get("PMI_SIZE")) != of_slurm
    return (_OPENMPI, _MVAPICH, *((_HYDRA, *slurm) if is_hydra else (*slurm, _HYDRA)))


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Return NAME=value of the first of the variables that is set."""
    return next((f"{name}={env[name]}" for name in names if env.get(name)), None)


def _started(env: Mapping[str, str], names: _Names, given: str) -> StartedProcess:
    size = _number(env, names.size, 1)
    rank = _number(env, names.rank, 0)
    if not 0 <= rank < size:
        raise ConfigError(f"{given}, of {size} processes: must be from 0 to {size - 1}")
    local_size = _local_size_of_slurm(env) if names is _SLURM else _number(env, names.local_size, 0)
    is_one_host = local_size == size
    local_rank = _number(env, names.local_rank, rank if is_one_host else 0)
    ids = [env[name] for name in names.job if env.get(name)]
    job = ".".join(ids) or (f"pid {_starter(names.rank)}" if is_one_host else "")
    why_not = ""
    if names is _SLURM and env.get("SLURM_PTY_PORT"):
        why_not = "a program in the terminal of one (srun --pty) would wait for the others for ever"
    instead = "set RANK, WORLD_SIZE and LOCAL_RANK for each"
    master = env.get("MASTER_ADDR") or (LOOPBACK if is_one_host else _first_host(env, names, rank))
    if not master and not why_not:
        why_not = "they are on several hosts: nothing says where rank 0 is"
        instead = "set MASTER_ADDR to the host of rank 0 for all of them"
    return StartedProcess(
        who=given, kind=names.kind, rank=rank, size=size, local_rank=local_rank, local_size=local_size or 1,
        job=job, master=master, why_not=why_not, instead=instead,
    )  # fmt: skip


def _number(env: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    given = _first(env, names)
    if given is None:
        return default
    name, _, text = given.partition("=")
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ConfigError(f"{name}={text!r} in the environment: must be a whole number")
    return int(text)


def _local_size_of_slurm(env: Mapping[str, str]) -> int:
    """Return how many tasks of the step are on this host: 2 on the third of `4(x2),2`; 0 if that is not
    said.
    """
    node = _number(env, ("SLURM_NODEID",), 0)
    for piece in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", piece)
        if match is None:
            return 0
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return 0


def _first_host(env: Mapping[str, str], names: _Names, rank: int) -> str:
    """The host of rank 0, among several; empty if that is not known."""
    if names is _SLURM and not env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", env.get("SLURM_STEP_NODELIST", ""))
        return "" if first is None else re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0])
    match = _HNP.fullmatch(env.get("OMPI_MCA_orte_hnp_uri", "")) if names is _OPENMPI else None
    if match is None or (rank == 0 and not _is_here(match[1])):  # mpirun ends the others, too
        return ""
    return match[1]


def _is_here(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _starter(rank_names: tuple[str, ...]) -> int:
    """The process that started all ranks of this host: the nearest above this one that is no rank itself."""
    pid = os.getppid()
    while pid > 1:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # the process is another user's, or this is no Linux
            return pid
        if not any(one.startswith(tuple(f"{name}=".encode() for name in rank_names)) for one in variables):
            return pid
        pid = int(status.rpartition(")")[2].split()[1])
    return pid


def refusal(started: StartedProcess, why: str) -> ConfigError:
    """The error of a process that is not to train alone and cannot join the others."""
    return ConfigError(
        f"{started.who} says that this is one of {started.size} processes of a job, and {why}; start it "
        f"with dslaunch --launcher {started.kind}, or {started.instead}. For processes that train alone, set "
        "RANK=0 and WORLD_SIZE=1"
    )


def join(started: StartedProcess, *, port: int) -> None:
    """Put RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT into the environment of
    this process, where torch, libraries and programs that it starts read them. A MASTER_PORT that is set goes
    before `port`; the default of that gives way to a port that follows from the job.

    Errors: ConfigError if the job cannot be joined
    """
    if started.why_not:
        raise refusal(started, started.why_not)
    if port == DEFAULT_PORT and started.job:
        port = _FIRST_PORT + zlib.crc32(started.job.encode()) % _NUM_PORTS
    os.environ.setdefault("MASTER_PORT", str(port))
    os.environ["MASTER_ADDR"] = started.master
    for name, value in (
        ("RANK", started.rank),
        ("WORLD_SIZE", started.size),
        ("LOCAL_RANK", started.local_rank),
        ("LOCAL_WORLD_SIZE", started.local_size),
    ):
        os.environ[name] = str(value)

"""The mpirun of Open MPI, MPICH, Intel MPI and MVAPICH: the command line for a plan.

Each mpirun gets exactly the plan's hosts, in the plan's order, and starts as many processes on a host as it
has ranks. Processes are not bound to cores (Open MPI's default would put a whole worker on one), unless
--launcher_args says so.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from functools import partial

from ..errors import EXIT_HOST, LaunchError
from ..node.observe.devices import count_accelerators
from .external import HOSTFILE, External
from .rank_start import RankStart

VERSION_TIMEOUT_S = 20.0
LOCALHOST = "localhost"  # name of this machine if there is no hostfile

# Settings that MVAPICH needs beside a training program: no binding of its own, and GPU memory handled simply.
# Source: DeepSpeed 0.19.6 launcher/multinode_runner.py, `MVAPICHRunner.__init__`.
#         A value exported to the workers wins.
_MVAPICH_SETTINGS = (
    ("MV2_SMP_USE_CMA", "0"),
    ("MV2_DEBUG_SHOW_BACKTRACE", "1"),
    ("MV2_SUPPORT_DL", "1"),
    ("MV2_ENABLE_AFFINITY", "0"),
    ("MV2_INTER_ALLGATHER_TUNING", "5"),
    ("MV2_CUDA_USE_NAIVE", "0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavour:
    """One MPI: the places of its mpirun, and how to tell it from the others."""

    title: str
    # Names of mpirun, the preferred first; Debian gives each MPI's mpirun a name of its own
    programs: tuple[str, ...]
    marks: tuple[str, ...]  # one of them is in the output of `mpirun --version`
    hint: str


FLAVOURS = {
    "openmpi": Flavour(
        title="Open MPI",
        programs=("mpirun.openmpi", "mpirun"),
        marks=("Open MPI", "OpenRTE", "PRRTE", "prterun"),
        hint="apt-get install openmpi-bin",
    ),
    "mpich": Flavour(
        title="MPICH",
        programs=("mpirun.mpich", "mpirun", "mpiexec.hydra"),
        marks=("HYDRA build details",),
        hint="apt-get install mpich",
    ),
    "impi": Flavour(
        title="Intel MPI",
        programs=("mpirun", "mpiexec.hydra"),
        marks=("Intel(R) MPI",),
        hint="install Intel MPI, and source its setvars.sh",
    ),
    "mvapich": Flavour(
        title="MVAPICH",
        programs=("mpirun",),
        marks=("HYDRA build details",),
        hint="install MVAPICH, and put its bin folder on PATH",
    ),
}


def find_mpirun(launcher: str, is_needed: bool = True) -> str:
    """Return the mpirun of this MPI on this machine; without `is_needed` its name, without a look for it.

    Errors: LaunchError if there is none, or if the one on PATH is another MPI's.
    """
    flavour = FLAVOURS[launcher]
    if not is_needed:
        return next((one for one in flavour.programs if shutil.which(one)), "mpirun")
    others = []
    for program in flavour.programs:
        if shutil.which(program) is None:
            continue
        title = _title_of(program)
        if title == flavour.title:
            return program
        others.append(f"{shutil.which(program)} is {title}'s")
    why = f"({' and '.join(others)})" if others else "(no mpirun on PATH)"
    raise LaunchError(
        f"--launcher={launcher}: the mpirun of {flavour.title} is not installed {why}; {flavour.hint}",
        exit_code=EXIT_HOST,
    )


def _title_of(program: str) -> str:
    """Name the MPI that a program belongs to."""
    said = _output([program, "--version"])
    for name in ("openmpi", "impi"):
        if any(mark in said for mark in FLAVOURS[name].marks):
            return FLAVOURS[name].title
    if any(mark in said for mark in FLAVOURS["mpich"].marks):
        is_mvapich = shutil.which("mpiname") is not None and "MVAPICH" in _output(["mpiname", "-a"])
        return FLAVOURS["mvapich" if is_mvapich else "mpich"].title
    return "an unknown MPI"


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def openmpi_command(
    start: RankStart, *, is_root: bool, this_machine: str = ""
) -> tuple[tuple[str, ...], str]:
    """Return the command, and the text of its hostfile.

    Each rank has its line in the hostfile, for the `seq` mapper: any other mapper puts the host where mpirun
    runs first, wherever that host is in the hostfile (github.com/open-mpi/ompi/issues/5043). That mapper
    does not know `localhost`, so `this_machine` is written for it: the name by which mpirun knows its own
    host.
    """
    argv = [start.program, "-n", str(start.num_ranks), "--hostfile", HOSTFILE]
    for option, value in (("--map-by", "seq"), ("--bind-to", "none")):
        if not _is_given(option, start.launcher_args):
            argv += [option, value]
    if is_root and "--allow-run-as-root" not in start.launcher_args:
        argv.append("--allow-run-as-root")
    argv += start.launcher_args
    for name in start.names:
        argv += ["-x", name]
    hosts = start.hosts_by_rank.splitlines()
    names = [this_machine if this_machine and host == LOCALHOST else host for host in hosts]
    return (*argv, *start.words), "".join(f"{name}\n" for name in names)


def mpich_command(start: RankStart) -> tuple[tuple[str, ...], None]:
    """Return the command. Errors: LaunchError for a host that cannot be written into -hosts."""
    _refuse_colons(start, "mpich")
    hosts = ",".join(f"{host}:{number}" for host, number in start.slots)
    return (start.program, "-n", str(start.num_ranks), "-hosts", hosts, *_hydra_tail(start)), None


def impi_command(start: RankStart) -> tuple[tuple[str, ...], None]:
    """Return the command. Errors: LaunchError for hosts with unequal numbers of ranks: its option takes one
    number for all.
    """
    _refuse_colons(start, "impi")
    numbers = sorted({number for _, number in start.slots})
    if len(numbers) > 1:
        least, most = (
            next(host for host, count in start.slots if count == number)
            for number in (numbers[0], numbers[-1])
        )
        raise LaunchError(
            f"--launcher=impi needs the same number of slots on every host, but {least} has {numbers[0]} and "
            f"{most} has {numbers[-1]}; use --num_gpus={numbers[0]}, or another launcher"
        )
    hosts = ",".join(host for host, _ in start.slots)
    head = (start.program, "-n", str(start.num_ranks), "-ppn", str(numbers[0]), "-hosts", hosts)
    return (*head, "-genv", "I_MPI_PIN", "0", *_hydra_tail(start)), None


def mvapich_command(start: RankStart, *, has_gpus: bool) -> tuple[tuple[str, ...], str]:
    """Return the command, and the text of its hostfile."""
    _refuse_colons(start, "mvapich")
    argv = [start.program, "-np", str(start.num_ranks), "-f", HOSTFILE]
    for name, value in (*_MVAPICH_SETTINGS, *((("MV2_USE_CUDA", "1"),) if has_gpus else ())):
        argv += ["-genv", name, value]
    hosts = "".join(f"{host}:{number}\n" for host, number in start.slots)
    return (*argv, *_hydra_tail(start)), hosts


def _hydra_tail(start: RankStart) -> tuple[str, ...]:
    """Return the end of the command, the same for every MPI that comes from MPICH."""
    return (*start.launcher_args, "-genvlist", ",".join(start.names), *start.words)


def _is_given(option: str, words: tuple[str, ...]) -> bool:
    """Tell whether `--option` or Open MPI's older `-option` is among the words."""
    return any(
        word.lstrip("-").partition("=")[0] == option.lstrip("-") for word in words if word.startswith("-")
    )


def _refuse_colons(start: RankStart, launcher: str) -> None:
    for host, _ in start.slots:
        if ":" in host:
            raise LaunchError(
                f"{host}: --launcher={launcher} takes no IPv6 address; write a name into the "
                "hostfile that means it"
            )


_HYDRA = (
    ("PMI_RANK", "PMIX_RANK"),
    ("PMI_SIZE",),
    ("PALS_LOCAL_RANKID", "MPI_LOCALRANKID"),
    ("PALS_LOCAL_SIZE", "MPI_LOCALNRANKS"),
)
_FIELDS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_MVAPICH = tuple((f"MV2_COMM_WORLD_{one}", *names) for one, names in zip(_FIELDS, _HYDRA, strict=True))
OPENMPI = External(
    partial(find_mpirun, "openmpi"),
    lambda start: openmpi_command(start, is_root=os.geteuid() == 0, this_machine=socket.gethostname()),
    (("OMPI_COMM_WORLD_RANK", "PMIX_RANK"), *((f"OMPI_COMM_WORLD_{one}",) for one in _FIELDS[1:])),
)
MPICH = External(partial(find_mpirun, "mpich"), mpich_command, _HYDRA, must_be_told=True)
IMPI = External(partial(find_mpirun, "impi"), impi_command, _HYDRA, must_be_told=True)
MVAPICH = External(
    partial(find_mpirun, "mvapich"),
    lambda start: mvapich_command(start, has_gpus=count_accelerators() > 0),
    _MVAPICH,
    must_be_told=True,
)

"""Turns a process that MPI or Slurm started into a worker of the job.

[Note: How a job travels without a stream]
MPI and Slurm start one process for each rank, and give us no stream to it. They carry environment variables
exactly and out of sight of `ps`: those that their command line names, and in some cases any other. So
everything travels there, as ASCII text:

    DSLAUNCH_SHIM               this module and what it imports
    DSLAUNCH_JOB_0, _1, ... the job: the number of pieces and a colon, then JSON, compressed, base64; in
                                pieces because the kernel allows 128 KiB for one variable
    DSLAUNCH_END                nothing; mpiexec of MPICH 4.0 forgets the last name of its list on other hosts

The process reads them, finds its rank in what MPI or Slurm says, and becomes the worker by exec(): exit codes
and signals are the worker's own. The variables are gone then.

[Note: Hydra and failures]
mpiexec of MPICH and its kin (Hydra) lets the others run on when a process fails
that never called MPI_Init, and ends with a mixture of all exit codes, 255 for a death by signal. So there the
process stays above its worker, and when that fails asks mpiexec, in PMI's words, to abort the job with the
worker's code.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...wire.frames import bytes_of
from ...wire.job import WrongForm, read_job, read_record
from ..observe.devices import count_accelerators
from ..system.address import is_address
from ..system.process_tree import die_with_parent
from .preparation import Prepared, Unprepared

if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ...wire.fast_tuple import Record as NamedTuple

SHIM_VARIABLE = "DSLAUNCH_SHIM"
JOB_VARIABLE = "DSLAUNCH_JOB_"
END_VARIABLE = "DSLAUNCH_END"
LOOK_EVERY_S = 1.0  # looks whether the parent of this process is still there

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ProcessIdentity(NamedTuple):
    """Identity of this process as the launcher gives it; None: the launcher does not give it."""

    rank: int
    size: int | None
    local_rank: int | None  # among the processes of this job on this host, from 0: no rotation
    local_size: int | None


class HostJob(NamedTuple):
    """One host of an ExternalJob."""

    name: str
    first_rank: int
    commands: list[int]  # for each of its ranks: the number of the job's command that it runs
    own: dict[str, Any]  # fields of its NodeJob that differ from other hosts; without the arguments of ranks


class ExternalJob(NamedTuple):
    """A job as each of its processes gets it. Fields that hosts and ranks have in common stand there once."""

    launcher: str
    # The variables that give each field of ProcessIdentity; the first that is set counts.
    says_who: list[list[str]]
    must_be_told: bool  # the launcher must hear of a worker that failed
    gives_devices: bool  # the launcher gives each process some of the host's devices
    master: list[list[str]]  # MASTER_ADDR and MASTER_PORT
    commands: list[list[str]]  # the words after the interpreter
    common: dict[str, Any]  # the fields of NodeJob that are the same on all hosts
    hosts: list[HostJob]


class Misplaced(Exception):
    """This process is not where the plan has it, or no variable says which rank it is."""


def identify(job: ExternalJob, environ: Mapping[str, str]) -> ProcessIdentity:
    """Return the identity of this process. One launcher's variables mean nothing to another: inside a Slurm
    job, mpirun's processes have SLURM_PROCID too, and it is 0 for all of them.

    Errors: Misplaced if the launcher does not say its rank.
    """
    rank, *others = (
        next((int(environ[one]) for one in names if environ.get(one, "").isdigit()), None)
        for names in job.says_who
    )
    if rank is None:
        raise Misplaced(
            f"--launcher={job.launcher} starts processes with {' or '.join(job.says_who[0])}, and there is "
            "none here; another MPI may have started this process"
        )
    return ProcessIdentity(rank, *others)


def check_place(
    identity: ProcessIdentity, job: ExternalJob, node: HostJob, *, is_host: Callable[[str], bool | None]
) -> None:
    """Check that this process is where the plan has its rank.

    `is_host` tells whether this host has a name; None: it cannot tell.

    Errors: Misplaced, with both sides.
    """
    world_size = sum(len(one.commands) for one in job.hosts)
    compared = (
        ("world size", world_size, identity.size),
        ("place on its host", identity.rank - node.first_rank, identity.local_rank),
        ("number of ranks on its host", len(node.commands), identity.local_size),
    )
    for what, expected, found in compared:
        if found is not None and found != expected:
            raise Misplaced(
                f"rank {identity.rank} has {what} {found}, but the plan for {node.name} says {expected}; "
                "leave options that place processes out of --launcher_args"
            )
    if is_host(node.name) is not False:
        return
    others = [one.name for one in job.hosts if one is not node]
    where = next(
        (name for name in others if _is_own_name(name) or (is_address(name) and is_host(name))), None
    )
    if where is not None:
        raise Misplaced(
            f"rank {identity.rank} was started on {where}, but the plan has it on {node.name}; "
            "write the hosts into the hostfile in the order in which they are used, and no "
            "placement into --launcher_args"
        )


def is_this_host(name: str) -> bool | None:
    """Tell whether `name` is this host's; None if no lookup here knows the name."""
    if _is_own_name(name):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)  # possible only with an address of our own
                return True
        except OSError:
            continue
    return False


def _is_own_name(name: str) -> bool:
    own, other = socket.gethostname().lower(), name.lower()
    if is_address(other):
        return False
    return own == other or (
        own.partition(".")[0] == other.partition(".")[0] and not ("." in own and "." in other)
    )


def given_devices(devices: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return the plan's devices among those that Slurm gave this process; the plan's own if Slurm gave none.

    Slot 0 of the plan is the first GPU of the allocation, whatever its number on the host.
    Errors: Unprepared if Slurm gave fewer.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if not visible or not any(environ.get(one) for one in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")):
        return devices
    allocated = [one.strip() for one in visible.split(",")]
    beyond = [one for one in devices if not one.isdigit() or int(one) >= len(allocated)]
    if beyond:
        raise Unprepared(
            f"slot {', '.join(beyond)} is asked for, but Slurm gave this process only GPU {visible}; ask "
            "it for as many GPUs as slots, all visible to every process, e.g. "
            "--launcher_args=--gpus-per-node=8",
            exit_code=3,
        )
    return [allocated[int(one)] for one in devices]


def become_worker(job: ExternalJob, environ: Mapping[str, str]) -> None:
    """Turn this process into its rank's worker; returns only by an exception.

    Errors: Misplaced, Unprepared; OSError if the program cannot be executed.
    """
    identity = identify(job, environ)
    node = next((one for one in job.hosts if 0 <= identity.rank - one.first_rank < len(one.commands)), None)
    if node is None:
        raise Misplaced(f"rank {identity.rank} is not in the plan; was -n among --launcher_args?")
    check_place(identity, job, node, is_host=is_this_host)
    node_job = read_job({**job.common, **node.own})._replace(master_port=None)
    place = identity.rank - node.first_rank
    num_devices = count_accelerators()
    if job.gives_devices and num_devices:
        node_job = node_job._replace(devices=given_devices(node_job.devices, environ))
        # Slurm's numbers: not those of this host's devices, and maybe no numbers at all.
        num_devices = max([num_devices, *(int(one) + 1 for one in node_job.devices if one.isdigit())])
    prepared = Prepared(node_job, num_devices=num_devices)
    if identity.rank == 0:
        for note in prepared.notes:
            print(f"dslaunch: {node.name}: {note}", file=sys.stderr, flush=True)
    env = {name: value for name, value in prepared.env.items() if not _is_ours(name)}
    for name, value in job.master + node_job.ranks[place].env:
        env[bytes_of(name)] = bytes_of(value)
    env.update(prepared.own_devices(env))
    program = [] if prepared.python is None else [prepared.python]
    argv = [bytes_of(one) for one in program + job.commands[node.commands[place]]]
    pmi = environ.get("PMI_FD", "")
    if job.must_be_told and pmi.isdigit():
        _stay_above(argv, env, pmi_fd=int(pmi))
    _exec(argv, env)


def _exec(argv: list[bytes], env: dict[bytes, bytes]) -> None:
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that would survive exec
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        raise Unprepared(
            f"cannot run {os.fsdecode(argv[0])}: {os.strerror(error.errno or 0)}", exit_code=127
        ) from None


def _stay_above(argv: list[bytes], env: dict[bytes, bytes], *, pmi_fd: int) -> None:
    """Run the worker below this process, and end as it does.

    See [Note: Hydra and failures]. Returns in the worker.
    """
    us = os.getpid()
    worker = os.fork()
    if worker == 0:
        die_with_parent(us, signal.SIGKILL)
        return

    def pass_on(signum: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signum)

    for passed in _PASSED_ON:
        signal.signal(passed, pass_on)
    status = _wait_for(worker)
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if code != 0:
        with contextlib.suppress(OSError):
            os.write(pmi_fd, b"cmd=abort exitcode=%d\n" % code)
    os._exit(code)


def _wait_for(worker: int) -> int:
    """Return the worker's status when it ends. Kill it if the parent of this process is gone, for nothing
    else would end it then.
    """
    starter = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        pid, status = os.waitpid(worker, os.WNOHANG)
        if pid:
            return status
        if os.getppid() != starter:
            os.kill(worker, signal.SIGKILL)
        signal.sigtimedwait([signal.SIGCHLD], LOOK_EVERY_S)


def read_external(environ: Mapping[str, str]) -> ExternalJob:
    """Read the job from its variables.

    Errors: Misplaced if they did not all arrive; WrongForm.
    """
    num_pieces, _, first = environ.get(f"{JOB_VARIABLE}0", "").partition(":")
    rest = [environ.get(f"{JOB_VARIABLE}{number}") for number in range(1, int(num_pieces or 0))]
    if not first or None in rest:
        raise Misplaced("the job did not arrive here whole: variables named DSLAUNCH_... got lost on the way")
    text = first + "".join(one for one in rest if one is not None)
    given = json.loads(zlib.decompress(base64.b64decode(text)))
    return read_record(ExternalJob, given, "the job", hosts=HostJob)


def _is_ours(name: bytes) -> bool:
    text = os.fsdecode(name)
    return text in (SHIM_VARIABLE, END_VARIABLE) or (
        text.startswith(JOB_VARIABLE) and text[len(JOB_VARIABLE) :].isdigit()
    )


def main() -> None:
    """Be a worker, or report the reason against it."""
    code = 3
    try:
        become_worker(read_external(os.environ), os.environ)
    except (Misplaced, WrongForm) as error:
        message = str(error)
    except Unprepared as error:
        message, code = str(error), error.exit_code
    else:
        raise AssertionError("a worker is never returned from")
    os.write(2, f"dslaunch: {socket.gethostname()}: {message}\n".encode("utf-8", "surrogateescape"))
    os._exit(code)

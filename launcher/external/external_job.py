"""A job whose processes MPI or Slurm starts: the command to run, and its environment.

launcher/node/workers/worker_shim.py, [Note: How a job travels without a stream], explains how the job reaches
the processes.
"""

from __future__ import annotations

import base64
import json
import shlex
import zlib
from dataclasses import dataclass

from ..backends.bootstrap import node_python, shim_source
from ..errors import LaunchError
from ..job.plan import Plan, job_of
from ..node.workers.worker_shim import END_VARIABLE, JOB_VARIABLE, SHIM_VARIABLE, ExternalJob, HostJob
from ..wire.job import as_json
from .external import HOSTFILE, External

MAX_VALUE_BYTES = 96_000  # limit of one variable; the kernel allows 128 KiB, name included

# The same text for every job, so that `ps` shows nothing of the job; without a backslash, because some tools
# on the way interpret it.
START_SHIM = (
    f'import base64,os,zlib;exec(zlib.decompress(base64.b64decode(os.environ["{SHIM_VARIABLE}"])).decode())'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedJob:
    """A command that starts every rank.

    HOSTFILE stands where the path of the file with `hostfile` in it will be.
    """

    backend: str  # the word of --launcher
    argv: tuple[str, ...]
    hostfile: str | None
    payload: tuple[tuple[str, str], ...]  # variables for the processes it starts
    external: External
    num_hosts: int = 1

    def describe(self) -> str:
        """Return the exact command, with its file and variables, for messages."""
        settings = "".join(f"{name}={shlex.quote(value)} " for name, value in self.external.settings)
        lines = [f"command: {settings}{shlex.join(self.argv)}"]
        if self.hostfile is not None:
            lines += [
                f"{HOSTFILE} is a temporary file:",
                *(f"  {line}" for line in self.hostfile.splitlines()),
            ]
        names = ", ".join(name for name, value in self.payload if value)
        lines.append(f"the job travels in the environment: {names}")
        return "\n".join(lines)


def start_command(python: str) -> tuple[str, ...]:
    """Command that MPI or Slurm starts for every rank."""
    return node_python(START_SHIM, python)


def payload(plan: Plan, launcher: str, external: External) -> tuple[tuple[str, str], ...]:
    """Variables by which a process started by `start_command` becomes the worker of its rank."""
    text = _packed(json.dumps(as_json(external_job(plan, launcher, external))))
    pieces = [text[start : start + MAX_VALUE_BYTES] for start in range(0, len(text), MAX_VALUE_BYTES)]
    pieces[0] = f"{len(pieces)}:{pieces[0]}"
    job = tuple((f"{JOB_VARIABLE}{number}", piece) for number, piece in enumerate(pieces))
    return ((SHIM_VARIABLE, _packed(shim_source())), *job, (END_VARIABLE, ""))


def external_job(plan: Plan, launcher: str, external: External) -> ExternalJob:
    """Return the whole job: shared fields once, each node's own fields, and each different command once."""
    if plan.master.address is None:
        raise AssertionError("the address of rank 0 must be in the plan of a job that others start")
    jobs = [job_of(plan, node) for node in plan.nodes]
    fields = [as_json(job._replace(ranks=[one._replace(arguments=[]) for one in job.ranks])) for job in jobs]
    common = {name: value for name, value in fields[0].items() if all(one[name] == value for one in fields)}
    commands: dict[tuple[str, ...], int] = {}
    hosts = [
        HostJob(
            name=node.host.name,
            first_rank=job.ranks[0].rank,
            commands=[commands.setdefault(tuple(one.arguments), len(commands)) for one in job.ranks],
            own={name: value for name, value in own.items() if name not in common},
        )
        for node, job, own in zip(plan.nodes, jobs, fields, strict=True)
    ]
    return ExternalJob(
        launcher=launcher,
        says_who=[[*names] for names in external.says_who],
        must_be_told=external.must_be_told,
        gives_devices=external.gives_devices,
        master=[["MASTER_ADDR", plan.master.address], ["MASTER_PORT", str(plan.master.port)]],
        commands=[list(words) for words in commands],
        common=common,
        hosts=hosts,
    )


def refuse_logins(plan: Plan, program: str) -> None:
    """Refuse hosts with a user or port of their own: a program that logs in by itself cannot reach them.

    Errors: LaunchError that names the first such host.
    """
    for node in plan.nodes:
        host = node.host
        if host.user is not None or host.port is not None:
            what = f"user {host.user}" if host.user is not None else f"port={host.port}"
            raise LaunchError(
                f"{host.name}: {what} in the hostfile, but {program} reaches the hosts by itself and takes "
                "neither user nor port; write them into ~/.ssh/config, and leave them out of the hostfile"
            )


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()

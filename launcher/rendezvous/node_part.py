"""One node's part of a job without SSH: its place, and its run together with the others."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..backends.local import local_channel
from ..backends.open_files import ensure_open_files
from ..controller.controller import Controller
from ..errors import LaunchError
from ..job.plan import NodePlan, Plan
from ..job.stdin_rank import with_stdin
from ..job.verdict import Failure, HostFailure, LauncherFailure, RankFailure, Verdict, with_early_ends
from ..node.system.own_addresses import own_addresses
from ..options import Options
from ..options.backend import SSH
from ..options.option import given_in
from ..options.start import StartOptions
from ..output.console import Console
from ..sync.sync_job import SyncJob
from ..wire.job import TOKEN_VARIABLE
from .coordinator import GOODBYE_S, Coordinator
from .member import Doors, OtherNodes
from .messages import JobIdentity, failure_of, identify
from .namesake import Namesake
from .node_rank import find_node_rank

# A value that is the same on all nodes of one job and differs in every other job. mpirun gives it to all its
# processes; under srun, where each step has a name of its own, Slurm's number of the job is taken.
MPIRUN_MARK, MPIRUN_JOB = "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"
SCHEDULER_JOBS = ("SLURM_HET_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """`plan` is the whole job's. `coordinator_port` is None if the user wants no coordinator."""

    plan: Plan
    node: NodePlan
    identity: JobIdentity
    coordinator_port: int | None
    timeout_s: float

    @property
    def own_plan(self) -> Plan:
        return self.plan._replace(nodes=(self.node,))

    def describe(self) -> str:
        port = self.coordinator_port
        how = "no coordinator" if port is None else f"coordinator on node 0, port {port}"
        return f"this is node {self.node.node_rank} ({self.node.host.name}); {how}"


def plan_part(options: Options, plan: Plan, *, pool: Sequence[str], environ: Mapping[str, str]) -> NodePart:
    """Return this node's part of the whole plan.

    Errors: LaunchError if it is not known which node this is, or the others could not find node 0.
    """
    node_rank = find_node_rank(
        options.rendezvous.node_rank,
        selected=[node.host.name for node in plan.nodes],
        pool=pool,
        environ=environ,
        own_names=_own_names(),
    )
    is_alone = len(plan.nodes) == 1
    if options.master_addr is None and not is_alone:
        raise LaunchError(
            "--no_ssh needs --master_addr: the address by which all nodes reach node 0 "
            f"({plan.nodes[0].host.name} in the hostfile); give the same one everywhere"
        )
    port, master_port = options.rendezvous.coordinator_port, plan.master.port
    if port is None:
        port = master_port + 1 if master_port < 65535 else master_port - 1
    if port == master_port:
        raise LaunchError(
            f"--coordinator_port={port} is the master port too, which rank 0 needs; choose another"
        )
    plan = plan._replace(
        master=plan.master._replace(is_port_fixed=True),
        nodes=with_stdin(
            tuple(
                node._replace(is_local=node.node_rank == node_rank, stdin_rank=None) for node in plan.nodes
            ),
            options,
        ),
    )
    return NodePart(
        plan=plan,
        node=plan.nodes[node_rank],
        identity=identify(plan, job_id=options.rendezvous.job_id or "", token=token_in(environ)),
        coordinator_port=None if is_alone or port == 0 else port,
        timeout_s=options.rendezvous.timeout_s,
    )


def token_in(environ: Mapping[str, str]) -> str:
    """Return the secret that the nodes of this job prove to know; empty if they share none.

    The number that a scheduler gave the job is no secret, but it keeps out connections that stray in from
    another job.
    """
    if environ.get(TOKEN_VARIABLE):
        return environ[TOKEN_VARIABLE]
    names = (MPIRUN_JOB,) if environ.get(MPIRUN_MARK) else SCHEDULER_JOBS
    return next((f"{name}={environ[name]}" for name in names if environ.get(name)), "")


def check_options(options: Options, console: Console) -> None:
    """Warn of options that have no meaning without SSH.

    Errors: LaunchError for those that would change the job, if they had one.
    """
    if options.backend.launcher != SSH:
        raise LaunchError(
            f"--no_ssh and --launcher={options.backend.launcher.name} exclude each other: the program that "
            "starts the nodes is the launcher; leave out one of them"
        )
    if options.restart.is_on or options.elastic.is_on:
        raise LaunchError(
            "--no_ssh starts nothing again and takes no spares (--max_restarts, --spares, --min_nodes, "
            "--max_nodes, --elastic_training, --notice_file, --notice_command); leave them out, and let the "
            "program that starts the nodes do "
            "that: backoffLimit of a Kubernetes Job, or `scontrol requeue` in a Slurm batch script"
        )
    if options.check.is_on:
        raise LaunchError(
            "--no_ssh connects to no host, so none can be looked at (--check, --check_gpu, "
            "--check_bandwidth); leave that out, and run `dslaunch check` where SSH works"
        )
    names = [*given_in(options.ssh)]
    if options.start.window != StartOptions().window:
        names.append("--connect_window")
    if options.force_multi:
        names.append("--force_multi")
    if names:
        console.warn(
            f"no effect with --no_ssh, which connects to no host: {', '.join(names)}; leave that out"
        )


def run_part(part: NodePart, console: Console, files: SyncJob | None = None) -> Verdict:
    """Run this node's part; the verdict is the whole job's, unless the other nodes could not be heard.

    `files` come back from its own agent.
    """
    member, coordinator = None, None
    if part.coordinator_port is not None:
        member = OtherNodes(
            part.identity,
            part.node.node_rank,
            console=console,
            heartbeat_s=part.plan.heartbeat_s,
            timeout_s=part.timeout_s,
        )
    controller = Controller(
        part.own_plan,
        connect=lambda node: local_channel(node, kill_grace_s=part.plan.kill_grace_s),
        console=console,
        peers=member,
        files=files,
    )
    with contextlib.ExitStack() as stack:
        if member is not None and part.coordinator_port is not None:
            stack.callback(member.close)
            if part.node.node_rank == 0:
                coordinator, ours = _coordinate(part, part.coordinator_port, console)
                member.start(ours, controller)
            else:
                address = part.plan.master.address or ""
                doors = Doors(address=address, port=part.coordinator_port, second_port=part.plan.master.port)
                member.start(doors, controller)
        verdict = controller.run()
    if coordinator is not None:
        coordinator.join(GOODBYE_S + 1)
    if member is None:
        return verdict
    known = [] if coordinator is None else coordinator.failures.known()
    all_failures = tuple(failure_of(failed, part.identity, now=at) for at, failed in known)
    own_name = part.identity.name_of(part.node.node_rank)
    verdict = whole_verdict(verdict, told=member.told, all_failures=all_failures, own_name=own_name)
    if coordinator is None:
        return verdict
    left = {
        one.rank: at_s
        for node_rank, at_s in coordinator.ended_at.items()
        for one in part.plan.nodes[node_rank].ranks
    }
    return with_early_ends(verdict, left, stopped_at=coordinator.failures.stopped_at)


def _coordinate(part: NodePart, port: int, console: Console) -> tuple[Coordinator, socket.socket]:
    """Start a coordinator, and return it with our own connection to it.

    Errors: LaunchError if there is another one on this machine, or if it may not open as many files as there
    are nodes
    """
    ensure_open_files(len(part.identity.names), hint="")
    coordinator = Coordinator(
        part.identity,
        console=console,
        heartbeat_s=part.plan.heartbeat_s,
        kill_grace_s=part.plan.kill_grace_s,
        timeout_s=part.timeout_s,
        second_port=part.plan.master.port,
    )
    namesake = Namesake(
        part.identity,
        address=part.plan.master.address or "",
        port=port,
        heartbeat_s=part.plan.heartbeat_s,
        is_ours=coordinator.is_ours,
    )
    try:
        coordinator.listen(port)
    except OSError as error:
        found = namesake.look()
        if found:
            raise LaunchError(found) from None
        console.warn(
            f"no coordinator: port {port} cannot be used here ({os.strerror(error.errno or 0)}). A failure "
            "on one node will not stop the others; free the port, or choose one with --coordinator_port"
        )
    ours, theirs = socket.socketpair()
    coordinator.adopt(theirs)
    coordinator.start()
    namesake.watch(coordinator.give_way, is_wanted=coordinator.is_gathering)
    return coordinator, ours


def whole_verdict(
    verdict: Verdict, *, told: Failure | None, all_failures: tuple[Failure, ...] = (), own_name: str = ""
) -> Verdict:
    """Return the job's verdict from that on our part and node 0's last message: our own words for a failure
    of ours.

    `own_name` is the others' name of this node. A standstill of this node explains everything that it heard
    of others after that.
    """
    if verdict.interrupted_by is not None:
        return verdict
    ours = [one for one in (verdict.culprit, *verdict.others) if one is not None]
    standstill = next((one for one in ours if isinstance(one, LauncherFailure)), None)
    if standstill is not None and (told is None or told.at_s >= standstill.at_s or told.name == own_name):
        theirs = (one for one in all_failures if one.name != own_name and one.at_s < standstill.at_s)
        announced = "" if verdict.announced == own_name else verdict.announced
        return verdict._replace(culprit=standstill, others=tuple(theirs), announced=announced)
    if told is None:
        return verdict
    culprit = next((one for one in ours if _is_same(one, told)), told)
    return verdict._replace(
        culprit=culprit, others=tuple(one for one in all_failures if not _is_same(one, culprit))
    )


def where_its_words_are(verdict: Verdict, part: NodePart) -> str:
    """Replace node 0's words about a rank elsewhere, whose last lines stay where they were written."""
    culprit = verdict.culprit
    if (
        part.node.node_rank != 0
        or not isinstance(culprit, RankFailure)
        or culprit.host == part.node.host.name
    ):
        return ""
    node_rank = part.identity.names.index(culprit.host)
    return f"what rank {culprit.rank} wrote is in the output of {part.identity.name_of(node_rank)}"


def _is_same(one: Failure, other: Failure) -> bool:
    if isinstance(one, RankFailure) and isinstance(other, RankFailure):
        return one.rank == other.rank
    return isinstance(one, HostFailure) and isinstance(other, HostFailure) and one.message == other.message


def _own_names() -> list[str]:
    hostname = socket.gethostname()
    return list(dict.fromkeys([hostname, *own_addresses()]))

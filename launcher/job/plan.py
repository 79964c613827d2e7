"""The plan of a job: each process, its host, command and environment.

Pure arithmetic; `--dry_run` prints it, the controller carries it out.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import NamedTuple

from ..inputs.env_file import EnvEntry
from ..inputs.hostfile import Host
from ..inputs.line_prefix import Origin
from ..inputs.selection import Selected
from ..options.elastic import ElasticOptions
from ..options.roles import Role
from ..wire.job import NodeJob, RankJob
from .mesh import HostSlots, JobMesh
from .mesh_estimate import Estimate

# Up to so many, each rank's numbers travel on their own; of more ranks, those of a host are folded
MOST_SINGLE_RANKS = 64


class RankPlan(NamedTuple):
    """One process to start. `rank` is unique in the job; `rank` and `local_rank` count from 0.

    On hosts with unequal slots `local_rank` is `rank % slots`, a rotation:
    programs written for DeepSpeed assert it.
    """

    rank: int
    local_rank: int
    env: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...]  # the words after the interpreter; the whole command with --no_python


class NodePlan(NamedTuple):
    """One host's part of the job. `is_local` means no SSH: the host is this machine.

    `stdin_rank` reads our input. `role` is the name of a server's role; its one process has the number of a
    rank that the job does not have: see roles.py.
    """

    node_rank: int
    host: Host
    is_local: bool
    devices: tuple[str, ...]  # one for each rank
    ranks: tuple[RankPlan, ...]
    stdin_rank: int | None = None
    role: str = ""


class Endpoint(NamedTuple):
    """The place where rank 0 listens. `address` None: the address at which the other nodes reach node 0. A
    port that is not fixed may be changed.
    """

    address: str | None
    port: int
    is_port_fixed: bool


class Program(NamedTuple):
    """The program of each rank. `python`: None with --no_python; `script`: a file that hosts must have."""

    python: str | None
    head: tuple[str, ...]  # the command line as far as the script, module or command, that included
    script: str | None
    arguments: tuple[str, ...]
    takes_local_rank: bool


class Plan(NamedTuple):
    """A whole job. `nodes` run its program; `servers` are the nodes beside them, `roles` what runs there."""

    nodes: tuple[NodePlan, ...]
    master: Endpoint
    program: Program
    cwd: str
    venv_script: str | None
    environment: tuple[EnvEntry, ...]
    kill_grace_s: float
    heartbeat_s: float
    stack_on_hang_s: float | None = None  # seconds of silence, after which the workers are asked for stacks
    # This process's id, if each agent must write its own into a file that is named after it
    save_pid: int | None = None
    # Modules that each host imports once, to fork its workers from; None: the host decides.
    preload: tuple[str, ...] | None = None
    has_timings: bool = False  # the workers report their first collective, too
    has_milestones: bool = False  # the workers report the phases of their start
    prepare_timeout_s: float = 600.0
    # The cores that a host's ranks share; empty for all that the host allows
    bind_cores: tuple[int, ...] | None = None
    mesh: JobMesh | None = None
    mesh_estimate: Estimate | None = None
    hosts_from: str = ""  # the file or variable that named the hosts, if the user did not
    elastic: ElasticOptions = ElasticOptions()
    metrics_interval_s: float = 0.0  # each rank reports its numbers once in this time; 0: never
    servers: tuple[NodePlan, ...] = ()
    roles: tuple[Role, ...] = ()
    health_timeout_s: float = 600.0  # a server has this long to become healthy
    snapshot_every: str = ""  # steps, or seconds as 30s, between snapshots in memory; empty: there are none
    attempt: int = 0  # number of starts of the job before
    keeps_agents: bool = False  # another attempt may follow, with the same agents

    @property
    def all_nodes(self) -> tuple[NodePlan, ...]:
        """Return the nodes in the order of their node_rank, servers last."""
        return self.nodes + self.servers

    @property
    def world_size(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)

    def role_of(self, node: NodePlan) -> Role:
        """Return the role of a server's node."""
        return next(one for one in self.roles if one.name == node.role)

    def place_of(self, rank: int) -> str:
        """Return the rank's place along the axes of --mesh; empty without it."""
        return "" if self.mesh is None else self.mesh.place(rank)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names of the hosts, in the order of their ranks."""
        return tuple(node.host.name for node in self.nodes)

    @property
    def host_slots(self) -> tuple[HostSlots, ...]:
        """Slots of the hosts, in the same order."""
        return tuple(HostSlots(node.host.name, len(node.ranks)) for node in self.nodes)


def plan_program(
    name: str,
    arguments: tuple[str, ...],
    *,
    python: str,
    is_module: bool = False,
    no_python: bool = False,
    no_local_rank: bool = False,
) -> Program:
    """Return the command line of every rank, without its rank."""
    head = (name,) if no_python else ("-u", "-m", name) if is_module else ("-u", name)
    return Program(
        python=None if no_python else python,
        head=head,
        script=None if no_python or is_module else name,
        arguments=arguments,
        takes_local_rank=not no_local_rank,
    )


def plan_nodes(
    selected: tuple[Selected, ...],
    program: Program,
    *,
    local_names: frozenset[str],
    env: Mapping[str, str] | None = None,
) -> tuple[NodePlan, ...]:
    """Give every device of every host one rank: hosts in hostfile order, devices in the order they were
    given.

    Source: DeepSpeed 0.19.8 launcher/launch.py, `global_rank_mapping`: the same ranks, so logs can be
    compared.
    """
    world_size = sum(len(one.devices) for one in selected)
    of_local_rank = functools.cache(functools.partial(_plan_local_rank, program=program))
    nodes = []
    first_rank = 0
    for node_rank, one in enumerate(selected):
        num_local = len(one.devices)
        node_env: dict[str, str | int] = {
            **(env or {}),
            "GROUP_RANK": node_rank,
            "GROUP_WORLD_SIZE": len(selected),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": world_size,
            "WORLD_SIZE": world_size,
            "LOCAL_SIZE": num_local,
            "LOCAL_WORLD_SIZE": num_local,
            "CROSS_RANK": node_rank,
            "CROSS_SIZE": len(selected),
        }
        of_node = tuple((name, str(value)) for name, value in node_env.items())
        ranks = tuple(
            _plan_rank(rank, of_local_rank(rank % num_local), of_node)
            for rank in range(first_rank, first_rank + num_local)
        )
        is_local = is_this_machine(one.host, local_names)
        nodes.append(
            NodePlan(node_rank=node_rank, host=one.host, is_local=is_local, devices=one.devices, ranks=ranks)
        )
        first_rank += num_local
    return tuple(nodes)


def is_this_machine(host: Host, local_names: frozenset[str]) -> bool:
    """Tell whether the host is this machine and needs no SSH. It does need SSH if a user (a login) or a port
    (another sshd) was given.
    """
    return host.name.lower() in local_names and host.user is None and host.port is None


def python_of(plan: Plan, host: Host) -> str | None:
    """Return the interpreter of a host's ranks; None with --no_python, empty for the agent's own."""
    of_others = "" if host.exec_prefix else plan.program.python
    return None if plan.program.python is None else host.python or of_others


def environment_of(plan: Plan, host: Host) -> tuple[EnvEntry, ...]:
    """Return a host's variables without those of each rank, such as RANK: the job's entries, then the host's
    own.

    If the host has a working folder of its own, that folder is in PYTHONPATH, as the job's is on other
    hosts.
    """
    entries = plan.environment
    if host.cwd is not None:
        folder = ("", "HOME", host.cwd[1:]) if host.cwd.startswith("~/") else (host.cwd,)
        value = (*folder[:-1], f"{folder[-1]}:", "PYTHONPATH", "")
        entries += (EnvEntry(name="PYTHONPATH", value=value, source="cwd= in the hostfile"),)
    return entries + host.env


def overruled(plan: Plan) -> tuple[EnvEntry, ...]:
    """Return the entries of files that have no effect, because dslaunch sets these variables for every rank.

    CUDA_VISIBLE_DEVICES is not among them, because a host without GPUs keeps it.
    """
    ours = {"MASTER_ADDR", "MASTER_PORT", *(name for name, _ in plan.nodes[0].ranks[0].env)}
    entries = (*plan.environment, *(entry for node in plan.nodes for entry in node.host.env))
    return tuple(dict.fromkeys(entry for entry in entries if entry.name in ours))


class _LocalRankPlan(NamedTuple):
    """The part of a local rank that is equal on all hosts. It is made once: otherwise a million ranks take
    gigabytes.
    """

    local_rank: int
    variable: tuple[str, str]
    arguments: tuple[str, ...]


def _plan_local_rank(local_rank: int, *, program: Program) -> _LocalRankPlan:
    option = (f"--local_rank={local_rank}",) if program.takes_local_rank else ()
    variable = ("LOCAL_RANK", str(local_rank))
    return _LocalRankPlan(local_rank, variable, program.head + option + program.arguments)


def _plan_rank(rank: int, local: _LocalRankPlan, of_node: tuple[tuple[str, str], ...]) -> RankPlan:
    number = str(rank)
    env = (("RANK", number), local.variable, ("ROLE_RANK", number), *of_node)
    return RankPlan(rank=rank, local_rank=local.local_rank, env=env, arguments=local.arguments)


def origins_of(plan: Plan) -> tuple[Origin, ...]:
    """Return the origin of the output of each rank and server."""
    return tuple(
        Origin(node.host.name, node.node_rank, one.rank, one.local_rank, node.role)
        for node in plan.all_nodes
        for one in node.ranks
    )


def job_of(plan: Plan, node: NodePlan) -> NodeJob:
    """Return the node's part of the plan as its agent gets it."""
    program = plan.program
    job = NodeJob(
        cwd=node.host.cwd or plan.cwd,
        python=python_of(plan, node.host),
        keeps_python=node.host.python is not None,
        script=program.script,
        module=program.head[-1] if program.python and program.script is None else None,
        num_head=len(program.head),
        adds_local_rank=program.takes_local_rank,
        preload=None if plan.preload is None else list(plan.preload),
        has_timings=plan.has_timings,
        has_milestones=plan.has_milestones,
        venv_script=plan.venv_script,
        environment=[[entry.name, *entry.value] for entry in environment_of(plan, node.host)],
        devices=list(node.devices),
        ranks=[RankJob(one.rank, [[*pair] for pair in one.env], list(one.arguments)) for one in node.ranks],
        master_port=plan.master.port if node.node_rank == 0 else None,
        is_port_fixed=plan.master.is_port_fixed,
        kill_grace_s=plan.kill_grace_s,
        heartbeat_s=plan.heartbeat_s,
        has_stacks=True,
        save_pid=plan.save_pid,
        stdin_rank=node.stdin_rank,
        prepare_timeout_s=plan.prepare_timeout_s,
        bind_cores=None if plan.bind_cores is None else list(plan.bind_cores),
        is_elastic=plan.elastic.is_on,
        notice_file=plan.elastic.notice_file,
        notice_command=plan.elastic.notice_command,
        metrics_interval_s=plan.metrics_interval_s,
        folds_metrics=plan.world_size > MOST_SINGLE_RANKS,
        is_verbatim=False,
        is_server=False,
        health=None,
        holds_memory=bool(plan.snapshot_every),
        keeps_agent=plan.keeps_agents,
    )
    return _as_server(plan, node, job) if node.role else job


def _as_server(plan: Plan, node: NodePlan, job: NodeJob) -> NodeJob:
    """Return the job of a server's node: a command in place of the program, for which no Python is looked
    for, no module imported and no core chosen.
    """
    health = plan.role_of(node).health
    return job._replace(
        python=None,
        script=None,
        module=None,
        num_head=len(node.ranks[0].arguments),
        adds_local_rank=False,
        preload=[],
        has_timings=False,
        has_milestones=False,
        environment=_with_path(plan, node.host, job),
        master_port=None,
        has_stacks=False,
        bind_cores=None,
        is_elastic=False,
        notice_file=None,
        notice_command=None,
        folds_metrics=False,
        is_server=True,
        holds_memory=False,
        health=None if health is None else [health.host, str(health.port), health.path],
    )


def _with_path(plan: Plan, host: Host, job: NodeJob) -> list[list[str]]:
    """Return the environment in which a command is first looked for beside the job's Python, as in a shell
    whose environment is active. --venv_script has set its own.
    """
    python = python_of(plan, host)
    if not python or not python.startswith("/") or plan.venv_script:
        return job.environment
    return [["PATH", f"{os.path.dirname(python)}:", "PATH", ""], *job.environment]

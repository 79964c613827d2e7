"""From options to a plan: every decision that this machine can make before any host is contacted."""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path

from ...shared import variables
from ..errors import LaunchError
from ..inputs import env_file
from ..inputs.env_file import EnvEntry
from ..inputs.host_list import folded
from ..job.mesh import HostSlots, JobMesh, check_hosts, make_mesh
from ..job.mesh_estimate import estimate_of
from ..job.plan import Endpoint, Plan, plan_nodes, plan_program
from ..job.restart import Attempt, first_attempt
from ..job.roles import divide
from ..job.server_plan import plan_servers, with_role
from ..job.stdin_rank import with_stdin
from ..job.trace_ranks import with_trace
from ..options import Options
from ..output.console import Console
from ..wire.frames import text_of
from ..wording import count
from .host_pool import local_names, read_pool

DEFAULT_PORT = 29500
MAX_PORT = 65535


def choose_attempt(options: Options, console: Console, *, may_look: bool = True) -> Attempt:
    """Return the hosts of the first attempt and its spares. If not `may_look`, no host is contacted for its
    slots.

    Errors: LaunchError if there are fewer hosts than --min_nodes asks for; others as read_pool()
    """
    pool = read_pool(options, console, may_look=may_look)
    hosts = pool.hosts
    division = divide(hosts, options)
    restart, run_id = options.restart, uuid.uuid4().hex[:12]
    may_have_spares = restart.is_on or restart.max_nodes is not None
    if may_have_spares and options.num_nodes > 0:  # the hosts that this leaves out may be spares
        division = divide(hosts, options._replace(num_nodes=-1))
    selected = division.trainers
    if division.left_out:
        console.say(f"no role, so no part in the job: {folded(division.left_out)}")
    if restart.min_nodes is not None and len(selected) < restart.min_nodes:
        raise LaunchError(
            f"--min_nodes={restart.min_nodes}, but there {'is' if len(selected) == 1 else 'are'} only "
            f"{count(len(selected), 'host')}; give it at most that"
        )
    if not may_have_spares:
        return Attempt(hosts=selected, run_id=run_id, hosts_from=pool.found_in, servers=division.servers)
    first = first_attempt(selected, restart, num_nodes=options.num_nodes, run_id=run_id)
    return first._replace(hosts_from=pool.found_in, servers=division.servers)


def make_plan(options: Options, attempt: Attempt) -> Plan:
    """Read the files that the options name and make every decision that this machine can make."""
    if options.is_module and options.no_python:
        raise LaunchError(
            "--module and --no_python exclude each other: a module needs Python; give one of them"
        )
    if options.start.preload and options.no_python:
        raise LaunchError(
            "--preload and --no_python exclude each other: only Python imports modules; give one of them"
        )
    if options.program == "-" and not (options.is_module or options.no_python):
        raise LaunchError(
            "the script - means standard input to Python, which the workers do not share; write the program "
            "into a file"
        )
    cwd = current_folder()
    program = plan_program(
        exact(options.program),
        tuple(exact(one) for one in options.arguments),
        python=sys.executable,
        is_module=options.is_module,
        no_python=options.no_python,
        no_local_rank=options.no_local_rank,
    )
    mesh = _mesh_of(options, attempt)
    env = _restart_env(options, attempt) | ({} if mesh is None else {variables.MESH: mesh.text})
    if options.snapshots.is_on:
        env |= {variables.SNAPSHOT_EVERY: options.snapshots.every, variables.ATTEMPT: str(attempt.number)}
    nodes = plan_nodes(attempt.hosts, program, local_names=local_names(options), env=env)
    nodes = with_trace(with_stdin(nodes, options), options.trace, is_first=attempt.number == 0)
    servers = plan_servers(
        attempt.servers,
        first_rank=sum(len(node.ranks) for node in nodes),
        first_node=len(nodes),
        local_names=local_names(options),
    )
    first_port = DEFAULT_PORT if options.master_port is None else options.master_port
    return Plan(
        nodes=with_role(nodes) if servers else nodes,
        master=Endpoint(
            address=options.master_addr,
            port=_port_of(attempt, first_port),
            is_port_fixed=options.master_port is not None and attempt.number == 0,
        ),
        program=program,
        cwd=exact(cwd),
        venv_script=options.venv_script and exact(options.venv_script),
        environment=_environment(options, cwd),
        kill_grace_s=options.kill_grace_s,
        heartbeat_s=options.heartbeat_s,
        stack_on_hang_s=options.process.stack_on_hang_s,
        preload=options.start.preload,
        has_timings=options.start.shows_timings,
        has_milestones=options.start.shows_timings or options.restart.is_on,
        prepare_timeout_s=options.start.prepare_timeout_s,
        save_pid=os.getpid() if options.process.saves_pid else None,
        bind_cores=options.binding.cores,
        mesh=mesh,
        mesh_estimate=estimate_of(options.mesh.estimate),
        hosts_from=attempt.hosts_from,
        elastic=options.elastic,
        metrics_interval_s=options.metrics.interval_s,
        servers=servers,
        roles=options.roles.roles,
        health_timeout_s=options.roles.health_timeout_s,
        snapshot_every=options.snapshots.every,
        attempt=attempt.number,
        keeps_agents=options.may_start_again,
    )


def _environment(options: Options, cwd: str) -> tuple[EnvEntry, ...]:
    """Return the variables of every rank, those that win last."""
    exported = env_file.exported(
        {exact(name): exact(value) for name, value in os.environ.items()},
        cwd=cwd,
        home=home_folder(),
        file_name=os.environ.get("DS_ENV_FILE"),
    )
    added = (one._replace(value=tuple(map(exact, one.value))) for one in options.variables)
    return (*options.drop_in.add_to(exported), *added)


def _mesh_of(options: Options, attempt: Attempt) -> JobMesh | None:
    hosts = [HostSlots(one.host.name, len(one.devices)) for one in attempt.hosts]
    mesh = make_mesh(options.mesh, sum(host.num_ranks for host in hosts), may_shrink=attempt.number > 0)
    if mesh is not None:
        check_hosts(mesh, hosts)
    return mesh


def _port_of(attempt: Attempt, first_port: int) -> int:
    """Return another port for each attempt: processes that still end may hold the old one.

    A given port is fixed for the first attempt only: the port beside it was not asked for.
    """
    port = first_port + attempt.number
    return port if port <= MAX_PORT else first_port - attempt.number


def _restart_env(options: Options, attempt: Attempt) -> dict[str, str]:
    """Return the variables of torchrun's restarts, which programs may read besides the numbers of ranks.

    Without restarts there are 0 of 0.
    """
    return {
        "TORCHELASTIC_RESTART_COUNT": str(attempt.num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(options.restart.max_restarts if options.restart.is_on else 0),
        "TORCHELASTIC_RUN_ID": attempt.run_id or options.rendezvous.job_id or "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 makes torch's store, not the agent
    }


def current_folder() -> str:
    """Return the current folder.

    Errors: LaunchError if that folder was deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the folder you are in was deleted; change to one that exists") from None


def home_folder() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise LaunchError("your home folder is not known; set HOME") from None


def exact(text: str) -> str:
    """Return text of the operating system as frame text: the same bytes in every locale."""
    return text_of(os.fsencode(text))

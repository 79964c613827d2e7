"""One job from options to exit code: read, plan, do."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click

from . import environment
from .auto_slots import with_known_slots
from .binding import format_ranges
from .bootstrap import agent_python, agent_source
from .channel import Channel
from .console import Console
from .controller import Controller
from .devices import count_accelerators
from .endpoint import LOOPBACK
from .errors import LaunchError
from .frames import Hello, text_of
from .hostfile import Host, read_hostfile
from .logs import REPORT
from .options import Options
from .plan import Endpoint, NodePlan, Plan, is_this_machine, plan_nodes, plan_program, python_of
from .restart import Attempt, decide, first_attempt
from .selection import Selected, hosts_in_question, local_devices_from_visible, select
from .verdict import Verdict

DEFAULT_HOSTFILE = Path("/job/hostfile")
DEFAULT_PORT = 29500
LOCAL_STOP_MARGIN_S = 10.0
OWNERS = (
    "openmpi",
    "mpich",
    "impi",
    "mvapich",
    "slurm",
)  # launchers that start and watch the processes themselves


def run(options: Options) -> int:
    """Start the job, or print its plan; returns the exit code.

    Errors: LaunchError for a mistake in what was given.
    """
    console = Console(log_level=options.log_level, logs=options.logs)
    if options.rendezvous.no_ssh_check:
        console.debug("--no_ssh_check has no effect: there is no check apart from connecting")
    if options.rendezvous.no_ssh:
        return _run_part(options, console)
    first = choose_attempt(options, console)
    options.logs.check(sum(len(one.devices) for one in first.hosts))
    if options.launcher in OWNERS:
        options.logs.refuse(f"--launcher={options.launcher}, which prints what the ranks write")
        return _run_owned(options, make_plan(options, first), console)
    if options.dry_run:
        plan = make_plan(options, first)
        text = describe(plan) if options.launcher != "pdsh" else _describe_pdsh(options, plan)
        click.echo(text.encode())  # UTF-8 whatever the locale is
        return 0
    verdict: Verdict | None = None
    attempt: Attempt | None = first
    while attempt is not None:
        plan = make_plan(options, attempt)
        controller = Controller(
            plan,
            connect=connector(options, plan.nodes),
            agent_source=agent_source(),
            console=console,
            window=options.start.window,
        )
        verdict = controller.run()
        if options.start.shows_timings:
            console.say(_timings(verdict, controller.first_output_s))
        console.report(verdict)
        decision = decide(attempt, verdict, options.restart)
        if decision.why:
            console.say(decision.why)
        attempt = decision.attempt
    if verdict is None:
        raise AssertionError("a job without an attempt")
    return _end(options, verdict, console)


def _end(options: Options, verdict: Verdict, console: Console) -> int:
    """Write the report and what is left to say; returns the exit code.

    Errors: LaunchError if something cannot be written, unless the job has failed anyway
    """
    if console.log_folder is not None:
        _write_report(console.log_folder / REPORT, verdict, option="--log_dir")
    if options.report:
        _write_report(Path(options.report), verdict, option="--report")
    console.finish(is_patient=verdict.interrupted_by is None)
    if console.failure is not None and verdict.exit_code == 0:
        raise console.failure
    return verdict.exit_code


def _run_owned(options: Options, plan: Plan, console: Console) -> int:
    """A job whose processes MPI or Slurm starts."""
    from .backends.owner import plan_owned, run_owned  # here: only such jobs need it

    plan, job = plan_owned(options, plan)
    if options.dry_run:
        click.echo(f"{describe(plan, how=f'by {job.argv[0]}')}\n{job.describe()}".encode())
        return 0
    verdict = run_owned(job, console)
    console.report(verdict)
    return _end(options, verdict, console)


def _run_part(options: Options, console: Console) -> int:
    """This node's part of a job that somebody else starts on every node."""
    from .part import check_options, plan_part, run_part, where_its_words_are  # here: only such jobs need it

    check_options(options, console)
    pool = _pool(options, console)
    selected = _select(pool, options)
    options.logs.check(sum(len(one.devices) for one in selected))
    plan = make_plan(options, Attempt(hosts=selected, run_id=""))
    part = plan_part(options, plan, pool=[host.name for host in pool], environ=os.environ)
    if options.dry_run:
        click.echo(f"{describe(part.plan, how='by its own dslaunch')}\n{part.describe()}".encode())
        return 0
    verdict = run_part(part, console)
    if options.start.shows_timings:
        console.say(_timings(verdict, None))
    console.report(verdict)
    if where := where_its_words_are(verdict, part):
        console.error(where)
    return _end(options, verdict, console)


def choose_attempt(options: Options, console: Console) -> Attempt:
    """The hosts of the first attempt and its spares.

    Errors: LaunchError if there are fewer hosts than --min_nodes asks for
    """
    hosts = _pool(options, console)
    selected = _select(hosts, options)
    restart, run_id = options.restart, uuid.uuid4().hex[:12]
    if restart.is_on and options.num_nodes > 0:  # the hosts that this leaves out may be spares
        selected = _select(hosts, replace(options, num_nodes=-1))
    if restart.min_nodes is not None and len(selected) < restart.min_nodes:
        raise LaunchError(
            f"--min_nodes={restart.min_nodes}, but there {'is' if len(selected) == 1 else 'are'} only "
            f"{_count(len(selected), 'host')}; give it at most that"
        )
    if not restart.is_on and restart.max_nodes is None:
        return Attempt(hosts=selected, run_id=run_id)
    return first_attempt(selected, restart, num_nodes=options.num_nodes, run_id=run_id)


def make_plan(options: Options, attempt: Attempt) -> Plan:
    """Read what the options name and decide everything that can be decided on this machine."""
    if options.is_module and options.no_python:
        raise LaunchError(
            "--module and --no_python exclude each other: a module needs Python; give one of them"
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
    nodes = plan_nodes(
        attempt.hosts, program, local_names=local_names(options), env=_restart_env(options, attempt)
    )
    first_port = DEFAULT_PORT if options.master_port is None else options.master_port
    return Plan(
        nodes=nodes,
        master=Endpoint(
            address=options.master_addr,
            port=first_port + attempt.number,  # the old one may still be held by what is on its way out
            is_port_fixed=options.master_port is not None,
        ),
        program=program,
        cwd=exact(cwd),
        venv_script=options.venv_script and exact(options.venv_script),
        environment=environment.exported(
            {exact(name): exact(value) for name, value in os.environ.items()},
            cwd=cwd,
            home=_home(),
            file_name=os.environ.get("DS_ENV_FILE"),
        ),
        kill_grace_s=options.kill_grace_s,
        heartbeat_s=options.heartbeat_s,
        stack_on_hang_s=options.process.stack_on_hang_s,
        save_pid=os.getpid() if options.process.saves_pid else None,
        bind_cores=options.binding.cores,
    )


def describe(plan: Plan, *, how: str | None = None, remotely: str = "by ssh") -> str:
    """The plan for people: every host with its ranks, devices and command. `how` they start, if not by an agent."""
    is_alone = len(plan.nodes) == 1
    address = plan.master.address or (LOOPBACK if is_alone else "node 0's address as the others reach it")
    or_next = "" if plan.master.is_port_fixed else " or another that is free"
    lines = [
        f"{_count(plan.world_size, 'rank')} on {_count(len(plan.nodes), 'host')}, in {plan.cwd}",
        f"master: {address}, port {plan.master.port}{or_next}",
    ]
    if plan.bind_cores is not None:
        cores = format_ranges(list(plan.bind_cores)) or "one CPU of each physical core"
        lines.append(f"each rank is bound to its share of its host's cores: {cores}")
    if plan.venv_script:
        lines.append(f"first, on every host: source {shlex.quote(plan.venv_script)}")
    lines += [f"environment: {_shown(entry)}" for entry in plan.environment]
    for node in plan.nodes:
        way = how or ("here, without ssh" if node.is_local else remotely)
        folder = f", in {node.host.cwd}" if node.host.cwd else ""
        lines.append(
            f"host {node.host.name} (node {node.node_rank}, {way}), devices {','.join(node.devices)}{folder}"
        )
        lines += [f"  environment: {_shown(entry)}" for entry in node.host.env]
        python = python_of(plan, node.host)
        for rank in node.ranks:
            words = ([python] if python else []) + list(rank.arguments)
            lines.append(f"  rank {rank.rank}, local rank {rank.local_rank}: {shlex.join(words)}")
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def _describe_pdsh(options: Options, plan: Plan) -> str:
    from .backends.pdsh import describe_pdsh

    others = [node.host for node in plan.nodes if not node.is_local]
    words = describe_pdsh(others, launcher_args=options.backend.launcher_args, ssh=options.ssh)
    return "\n".join([describe(plan, remotely="by pdsh"), *words])


def _shown(entry: environment.EnvEntry) -> str:
    value = "".join(f"${{{part}}}" if place % 2 else part for place, part in enumerate(entry.value))
    return f"{entry.name}={'***' if environment.is_secret(entry.name) else value!r} (from {entry.source})"


def _restart_env(options: Options, attempt: Attempt) -> dict[str, str]:
    """What programs written for torchrun look at; nothing if the job would not start again."""
    if not options.restart.is_on:
        return {}
    return {
        "TORCHELASTIC_RESTART_COUNT": str(attempt.num_restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(options.restart.max_restarts),
        "TORCHELASTIC_RUN_ID": attempt.run_id,
    }


def _timings(verdict: Verdict, first_output_s: float | None) -> str:
    """The phases in order of time, each with the seconds from the beginning to its end."""
    phases = dict(verdict.phases_s)
    if first_output_s is not None:
        phases["first output"] = first_output_s
    shown = (f"{name} {seconds:.2f} s" for name, seconds in sorted(phases.items(), key=lambda item: item[1]))
    return f"timings: {', '.join(shown)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _pool(options: Options, console: Console) -> tuple[Host, ...]:
    """The hosts that may be used, before any selection; those that can take part have known slots."""
    path = hostfile_path(options)
    if path is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible:
            console.warn(
                f"CUDA_VISIBLE_DEVICES={visible} is not used: it speaks of this machine, and the hostfile {path} says "
                "which devices each host has; choose with --include or devices= in the hostfile"
            )
        hosts = read_hostfile(path)
        if not options.rendezvous.no_ssh:
            return _with_known_slots(hosts, options, console)
        unknown = [host.name for host in hosts if host.slots is None]
        if unknown:
            raise LaunchError(
                f"{path}: slots=auto ({', '.join(unknown)}) cannot be used with --no_ssh: no node can look at another; "
                "write slots=N"
            )
        return hosts
    if options.rendezvous.no_ssh:
        raise LaunchError(
            f"--no_ssh needs a hostfile, which says how many nodes and ranks there are, and none was given (nor is there "
            f"{DEFAULT_HOSTFILE}); give --hostfile"
        )
    if options.num_nodes > 1:
        raise LaunchError(
            f"--num_nodes={options.num_nodes} needs a hostfile, and none was given (nor is there {DEFAULT_HOSTFILE})"
        )
    if options.launcher == "ssh" and options.force_multi:
        console.debug("--force_multi: this machine is reached by ssh too")
    num_devices = count_accelerators()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    is_filtered = bool(options.include or options.exclude) or max(options.num_nodes, options.num_gpus) > 0
    if visible and num_devices and is_filtered:
        console.warn(f"CUDA_VISIBLE_DEVICES={visible} is not used: --include, --exclude or --num_gpus decide")
    elif visible and num_devices:
        devices = local_devices_from_visible(visible)
        if not devices:
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU; unset it, or name the GPUs to use"
            )
        return (Host(name="localhost", slots=len(devices), devices=devices),)
    return (Host(name="localhost", slots=num_devices or max(1, options.num_gpus)),)


def _with_known_slots(hosts: tuple[Host, ...], options: Options, console: Console) -> tuple[Host, ...]:
    in_question = hosts_in_question(
        hosts,
        include=options.include,
        exclude=options.exclude,
        num_nodes=-1 if options.restart.is_on else options.num_nodes,
        num_gpus=options.num_gpus,
    )

    def look(unknown: tuple[Host, ...]) -> tuple[Hello | str, ...]:
        from .probe import probe  # here: most jobs do not look

        console.say(f"slots=auto: looking at {_count(len(unknown), 'host')}")
        nodes = tuple(
            NodePlan(
                node_rank=place,
                host=host,
                is_local=is_this_machine(host, local_names(options)),
                devices=(),
                ranks=(),
            )
            for place, host in enumerate(unknown)
        )
        return tuple(probe(nodes, connector(options, nodes)).values())

    return with_known_slots(
        hosts, in_question=in_question, look=look, num_cpu_workers=max(1, options.num_gpus)
    )


def _select(hosts: tuple[Host, ...], options: Options) -> tuple[Selected, ...]:
    return select(
        hosts,
        include=options.include,
        exclude=options.exclude,
        num_nodes=options.num_nodes,
        num_gpus=options.num_gpus,
    )


def hostfile_path(options: Options) -> Path | None:
    """The hostfile to read. The word None means not given, as scripts that generate command lines write it."""
    if options.launcher == "local":
        if options.hostfile not in (None, "None"):
            raise LaunchError(
                "--launcher=local runs on this machine only and takes no --hostfile; leave out one of them"
            )
        return None
    if options.hostfile in (None, "None"):
        return DEFAULT_HOSTFILE if DEFAULT_HOSTFILE.exists() else None
    return Path(str(options.hostfile))


def local_names(options: Options) -> frozenset[str]:
    """The names that mean this machine, unless everything is to go through ssh."""
    if options.force_multi:
        return frozenset()
    hostname = socket.gethostname().lower()
    return frozenset({"localhost", "127.0.0.1", "::1", hostname, hostname.partition(".")[0]})


def connector(options: Options, nodes: Sequence[NodePlan]) -> Callable[[NodePlan], Channel]:
    """How to reach each host. SSH settings are resolved before anything is connected, so mistakes there come first."""
    targets = {}
    others = [node for node in nodes if not node.is_local]
    if others and options.launcher == "pdsh":
        from .backends.pdsh import Pdsh

        pdsh = Pdsh(others, launcher_args=options.backend.launcher_args, ssh=options.ssh)
    elif others:
        from .ssh_config import resolve  # here and below: a local job does not load paramiko (60 ms)

        targets = {node.node_rank: resolve(node.host, options.ssh) for node in others}

    def connect(node: NodePlan) -> Channel:
        if node.is_local:
            from .backends.local import LocalChannel

            return LocalChannel(end_within_s=options.kill_grace_s + LOCAL_STOP_MARGIN_S)
        if not targets:
            return pdsh.connect(node)
        from .backends.ssh import SshChannel

        return SshChannel(targets[node.node_rank], python=agent_python(node.host))

    return connect


def current_folder() -> str:
    """Where we are.

    Errors: LaunchError if that folder was deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the folder you are in was deleted; change to one that exists") from None


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise LaunchError("nobody knows your home folder; set HOME") from None


def exact(text: str) -> str:
    """Text of the operating system as frame text: the same bytes whatever the locale is."""
    return text_of(os.fsencode(text))


def _write_report(path: Path, verdict: Verdict, *, option: str) -> None:
    try:
        path.write_text(json.dumps(verdict.to_dict(), indent=2) + "\n")
    except OSError as error:
        raise LaunchError(f"{option}={path}: cannot be written: {error.strerror}") from None

"""The hosts that may be used: the hostfile's, a batch system's, or this machine, and the chosen ones."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..backends.choose import direct_connect
from ..errors import LaunchError
from ..fleet.auto_slots import with_known_slots
from ..inputs.host import MAX_SLOTS
from ..inputs.host_sources import find_source, read_source, source_of_file, task_of, torchrun_hosts
from ..inputs.hostfile import Host, read_hostfile, read_piped_hostfile
from ..inputs.hostfile_list import is_host_list, parse_host_list
from ..inputs.selection import Selected, hosts_in_question, local_devices_from_visible, select
from ..job.plan import NodePlan, is_this_machine
from ..node.observe.devices import count_accelerators
from ..node.system.address import is_address
from ..options import Options
from ..options.backend import SLURM, WAYS
from ..options.option import read
from ..output.console import Console
from ..wire.frames import Hello
from ..wording import count
from .exec_prefix import with_prefix

DEFAULT_HOSTFILE = Path("/job/hostfile")


class Pool(NamedTuple):
    """The hosts that may be used, before any selection; hosts that can take part have known slots."""

    hosts: tuple[Host, ...]
    # The variable that named them, with its file if it names one; empty unless they were found there.
    found_in: str = ""


class NamedHosts(NamedTuple):
    """Hosts that were named, on the command line or by a batch system."""

    hosts: tuple[Host, ...]
    name: str  # the beginning of errors
    label: str  # their name within a sentence
    found_in: str = ""


def read_pool(options: Options, console: Console, *, may_look: bool = True) -> Pool:
    """Return the hosts that may be used. If not `may_look`, no host is contacted for its slots.

    Errors: LaunchError for wrong hosts, and for slots=auto where no host can be looked at
    """
    named = named_hosts(options, console)
    if not options.rendezvous.no_ssh and (task := task_of(os.environ)):
        console.warn(
            f"{task}, and each starts a job of its own; start dslaunch once, "
            "or once on each host with --no_ssh"
        )
    if named is None:
        if lost := torchrun_hosts(os.environ):
            console.warn(lost)
        return Pool(with_prefix(_this_machine(options, console), options))
    named = named._replace(hosts=with_prefix(named.hosts, options))
    _warn_of_visible(named, console)
    unknown = [host.name for host in named.hosts if host.slots is None]
    if unknown and options.rendezvous.no_ssh:
        raise LaunchError(
            f"{named.name}: slots=auto ({', '.join(unknown)}) cannot be used with --no_ssh: no node can look "
            "at another; write slots=N"
        )
    if unknown and not may_look:
        raise LaunchError(
            f"{named.name}: slots=auto ({', '.join(unknown[:4])}) needs a look at the host, and this "
            "command contacts none; write slots=N"
        )
    if options.rendezvous.no_ssh:
        return Pool(named.hosts, named.found_in)
    return Pool(_with_known_slots(named.hosts, options, console), named.found_in)


def _warn_of_visible(named: NamedHosts, console: Console) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return
    # In a batch job the variable is set for this host. It repeats the slots if it counts from 0.
    if named.found_in and visible == ",".join(map(str, range(visible.count(",") + 1))):
        return
    console.warn(
        f"CUDA_VISIBLE_DEVICES={visible} is not used: it speaks of this machine, and {named.label} "
        "says which devices each host has; choose with --include or devices= in the hostfile"
    )


def _this_machine(options: Options, console: Console) -> tuple[Host, ...]:
    """Return this machine alone, with the devices it has or shows."""
    if options.rendezvous.no_ssh:
        raise LaunchError(
            "--no_ssh needs a hostfile, which says how many nodes and ranks there are, and none was given "
            f"(nor is there {DEFAULT_HOSTFILE}); give --hostfile"
        )
    if options.num_nodes > 1:
        raise LaunchError(
            f"--num_nodes={options.num_nodes} needs a hostfile, and none was given (nor is there "
            f"{DEFAULT_HOSTFILE}); give --hostfile"
        )
    if options.backend.launcher.name in WAYS and options.force_multi:
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
        num_nodes=-1 if options.restart.is_on or options.roles.is_on else options.num_nodes,
        num_gpus=options.num_gpus,
    )

    def look(unknown: tuple[Host, ...]) -> tuple[Hello | str, ...]:
        from ..fleet.probe import ANSWER_TIMEOUT_S, probe

        console.say(f"slots=auto: looking at {count(len(unknown), 'host')}")
        nodes = nodes_of(tuple((Selected(host, ()), None) for host in unknown), options)
        connect = direct_connect(options, nodes, say=lambda line: None)
        return tuple(probe(nodes, connect, timeout_s=options.ssh.all_steps_s(ANSWER_TIMEOUT_S)).values())

    return with_known_slots(
        hosts,
        in_question=in_question,
        look=look,
        num_cpu_workers=max(1, options.num_gpus),
        warn=console.warn if options.restart.is_on else None,
    )


def select_hosts(hosts: tuple[Host, ...], options: Options) -> tuple[Selected, ...]:
    return select(
        hosts,
        include=options.include,
        exclude=options.exclude,
        num_nodes=options.num_nodes,
        num_gpus=options.num_gpus,
    )


def named_hosts(options: Options, console: Console | None = None) -> NamedHosts | None:
    """Return the hosts to use: those of --hostfile, else of the default hostfile, else those that a batch
    system or MPI has named. None: this machine, also if it is the only host that was found.

    The word None means not given, as scripts that generate command lines write it. Errors: LaunchError for
    wrong hosts
    """
    warn = (lambda text: None) if console is None else console.warn
    if options.backend.launcher.is_local:
        if options.hostfile not in (None, "None"):
            raise LaunchError(
                "--launcher=local runs on this machine only and takes no --hostfile; leave out one of them"
            )
        return None
    given = None if options.hostfile == "None" else options.hostfile
    if given == "-":
        return NamedHosts(read_piped_hostfile(warn=warn), "standard input", "the hostfile on standard input")
    if given is not None and (source := source_of_file(given, os.environ)) is not None:
        hosts = read_source(source, os.environ, may_look=_may_look(options), warn=warn)
        return NamedHosts(hosts, given, f"the hostfile {given}")
    path = DEFAULT_HOSTFILE if given is None else Path(given)
    if given is not None and is_host_list(given) and not os.path.lexists(path):
        return NamedHosts(parse_host_list(given), f"--hostfile {given}", f"--hostfile={given}")
    if given is not None or path.exists():
        return NamedHosts(read_hostfile(path, warn=warn), str(path), f"the hostfile {path}")
    return _found_hosts(options, console, warn)


def hostfile_path(options: Options) -> Path | None:
    """Return the file that names the hosts and may be read again; None if they are named elsewhere."""
    given = None if options.hostfile == "None" else options.hostfile
    if options.backend.launcher.is_local or given == "-":
        return None
    if given is None:
        return DEFAULT_HOSTFILE if DEFAULT_HOSTFILE.exists() else None
    path = Path(given)
    is_list = is_host_list(given) and not os.path.lexists(path)
    return None if is_list or source_of_file(given, os.environ) is not None else path


def _may_look(options: Options) -> bool:
    """Tell whether hosts can be looked at for their GPUs: not if a batch system's program reaches them."""
    return not (options.rendezvous.no_ssh or options.backend.launcher.starts_itself)


def _found_hosts(
    options: Options, console: Console | None, warn: Callable[[str], object]
) -> NamedHosts | None:
    is_part = options.rendezvous.no_ssh
    source = find_source(os.environ, of_step=is_part)
    if source is None:
        return None
    hosts = read_source(source, os.environ, may_look=_may_look(options), warn=warn)
    place = source.variable + (f"={os.environ[source.variable]}" if source.is_file else "")
    is_alone = len(hosts) == 1 and _is_here(hosts[0])
    if is_alone and not is_part and options.backend.launcher != SLURM:
        if console is not None:
            console.debug(f"{place} ({source.system}) names this machine alone, whose own devices are used")
        return None
    task = "" if is_part else task_of(os.environ)
    if task:
        raise LaunchError(
            f"{task}, and each would start a job on the {count(len(hosts), 'host')} of {place}; "
            "start dslaunch once, without it; or once on each host with --no_ssh; "
            "or name the hosts with --hostfile"
        )
    if console is not None:
        known = [host.slots for host in hosts if host.slots is not None]
        slots = count(sum(known), "slot") if len(known) == len(hosts) else "one slot for each GPU found there"
        console.say(f"hosts from {source.system}, {place}: {count(len(hosts), 'host')}, {slots}")
    return NamedHosts(hosts, place, place, found_in=f"{place} ({source.system})")


def _is_here(host: Host) -> bool:
    own, name = socket.gethostname().lower(), host.name.lower()
    return name in ("localhost", own) or (not is_address(name) and own.split(".")[0] == name.split(".")[0])


def local_names(options: Options) -> frozenset[str]:
    """Names that mean this machine; none if every host is reached through ssh."""
    if options.force_multi:
        return frozenset()
    hostname = socket.gethostname().lower()
    return frozenset({"localhost", "127.0.0.1", "::1", hostname, hostname.partition(".")[0]})


def host_options(given: dict[str, Any], *, program: str = "", **more: Any) -> Options:
    """Return the options of another command in the form of a job's options, with `more`."""
    return read(Options, given, program=program, **more)


def choose_hosts(options: Options, console: Console) -> tuple[tuple[Selected, int | None], ...]:
    """Return the hosts that take part, each with its number of slots, or None if the hostfile leaves that to
    the host.

    No host is contacted. Without a hostfile it is this machine.
    Errors: LaunchError as named_hosts() and select().
    """
    named = named_hosts(options, console)
    hosts = with_prefix((Host(name="localhost", slots=None),) if named is None else named.hosts, options)
    # Any slot may be named of a host whose number of slots is unknown.
    known = tuple(host if host.slots is not None else host._replace(slots=MAX_SLOTS) for host in hosts)
    selected = select_hosts(known, options)
    own = {host.name: host for host in hosts}
    return tuple(
        (
            one._replace(host=own[one.host.name]),
            None if own[one.host.name].slots is None else len(one.devices),
        )
        for one in selected
    )


def nodes_of(chosen: tuple[tuple[Selected, int | None], ...], options: Options) -> tuple[NodePlan, ...]:
    """Return the hosts as nodes without ranks."""
    return tuple(
        NodePlan(
            node_rank=place,
            host=one.host,
            is_local=is_this_machine(one.host, local_names(options)),
            devices=one.devices if num_slots is not None else (),
            ranks=(),
        )
        for place, (one, num_slots) in enumerate(chosen)
    )

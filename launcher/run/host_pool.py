"""The hosts that may be used: the hostfile's, or this machine, and those of them that are chosen."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..backends.choose import direct_connect
from ..errors import LaunchError
from ..fleet.auto_slots import with_known_slots
from ..inputs.host import MAX_SLOTS
from ..inputs.hostfile import Host, read_hostfile
from ..inputs.selection import Selected, hosts_in_question, local_devices_from_visible, select
from ..job.plan import NodePlan, is_this_machine
from ..node.devices import count_accelerators
from ..options import Options
from ..options.backend import SSH
from ..options.hosts import read_ssh
from ..output.console import Console
from ..wire.frames import Hello
from ..wording import count

DEFAULT_HOSTFILE = Path("/job/hostfile")


def read_pool(options: Options, console: Console) -> tuple[Host, ...]:
    """The hosts that may be used, before any selection; those that can take part have known slots."""
    path = hostfile_path(options)
    if path is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible:
            console.warn(
                f"CUDA_VISIBLE_DEVICES={visible} is not used: it speaks of this machine, and the hostfile "
                f"{path} says which devices each host has; choose with --include or devices= in the hostfile"
            )
        hosts = read_hostfile(path, warn=console.warn)
        if not options.rendezvous.no_ssh:
            return _with_known_slots(hosts, options, console)
        unknown = [host.name for host in hosts if host.slots is None]
        if unknown:
            raise LaunchError(
                f"{path}: slots=auto ({', '.join(unknown)}) cannot be used with --no_ssh: no node can look "
                "at another; write slots=N"
            )
        return hosts
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
    if options.backend.launcher == SSH and options.force_multi:
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
        from ..fleet.probe import probe  # here: most jobs do not look

        console.say(f"slots=auto: looking at {count(len(unknown), 'host')}")
        nodes = nodes_of(tuple((Selected(host, ()), None) for host in unknown), options)
        return tuple(probe(nodes, direct_connect(options, nodes)).values())

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


def hostfile_path(options: Options) -> Path | None:
    """The hostfile to read. The word None means not given, as scripts that generate
    command lines write it.
    """
    if options.backend.launcher.is_local:
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


def host_options(given: dict[str, Any], *, program: str = "", **more: Any) -> Options:
    """The options that name hosts, and `more`, in the form that a job's have."""
    return Options(
        hostfile=given["hostfile"],
        include=given["include"],
        exclude=given["exclude"],
        num_nodes=given["num_nodes"],
        ssh=read_ssh(given),
        program=program,
        **more,
    )


def choose_hosts(
    options: Options, *, warn: Callable[[str], object]
) -> tuple[tuple[Selected, int | None], ...]:
    """The hosts that take part, each with its number of slots, or None if the hostfile
    leaves that to the host.

    Nothing is connected to. Without a hostfile it is this machine. `warn` is told of what has no effect.
    Errors: LaunchError as read_hostfile() and select().
    """
    path = hostfile_path(options)
    hosts = read_hostfile(path, warn=warn) if path is not None else (Host(name="localhost", slots=None),)
    # Of a host that has not said how many slots it has, any may be named.
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
    """The hosts as nodes without ranks."""
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

"""The hosts that a command other than a job is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .hostfile import Host, read_hostfile
from .options import Options
from .options.hosts import read_ssh
from .plan import NodePlan, is_this_machine
from .run import hostfile_path, local_names
from .selection import Selected, select


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


def choose_hosts(options: Options) -> tuple[tuple[Selected, int | None], ...]:
    """The hosts that take part, each with its number of slots, or None if the hostfile leaves that to the host.

    Nothing is connected to. Without a hostfile it is this machine.
    Errors: LaunchError as read_hostfile() and select().
    """
    path = hostfile_path(options)
    hosts = read_hostfile(path) if path is not None else (Host(name="localhost", slots=None),)
    selected = select(
        tuple(host if host.slots is not None else replace(host, slots=1) for host in hosts),
        include=options.include,
        exclude=options.exclude,
        num_nodes=options.num_nodes,
    )
    is_auto = {host.name for host in hosts if host.slots is None}
    return tuple((one, None if one.host.name in is_auto else len(one.devices)) for one in selected)


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

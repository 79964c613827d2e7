"""The roles of the hosts of a job: which are trainers, and which run a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import LaunchError
from ..inputs.host import Host
from ..inputs.selection import Selected, named_hosts, select
from ..options import Options
from ..options.roles import TRAINER, Role, RoleOptions


class Server(NamedTuple):
    """One host of a role; `place` is that among the role's hosts, from 0."""

    role: Role
    place: int
    host: Selected


class HostRoles(NamedTuple):
    """The hosts of a job by role, both in hostfile order; `left_out` are names of hosts without one."""

    trainers: tuple[Selected, ...]
    servers: tuple[Server, ...] = ()
    left_out: tuple[str, ...] = ()


def divide(hosts: Sequence[Host], options: Options) -> HostRoles:
    """Choose the hosts that take part, and give each its role. --include and --exclude choose among all,
    --num_nodes and --num_gpus among the trainers.

    Errors: LaunchError for a host in two roles, for hosts and roles that are not there, and if no trainer is
    left; others as select()
    """
    placed = _placed(hosts, options.roles)
    if not placed:
        return HostRoles(_select(hosts, options))
    # Where the trainers are named, a host without a role takes no part
    default = "" if any(one.role == TRAINER for one in placed.values()) else TRAINER
    role_of = {host.name: placed.get(host.name, _Placed(default)).role for host in hosts}
    trainers = [host for host in hosts if role_of[host.name] == TRAINER]
    if not trainers:
        raise LaunchError(
            f"--role: every host ({', '.join(host.name for host in hosts)}) has the role of a server, and "
            f"none is left for the trainers, which run {options.program}; leave them one, or add one to the "
            "hostfile"
        )
    if options.include or options.exclude:
        chosen = _select(hosts, options)
        _check_choice(chosen, role_of, options)
    else:
        servers = [host for host in hosts if role_of[host.name] not in ("", TRAINER)]
        chosen = _select(trainers, options) + tuple(Selected(host, host.device_ids) for host in servers)
    chosen = tuple(_with_devices(one, placed.get(one.host.name)) for one in chosen)
    return HostRoles(
        tuple(one for one in chosen if role_of[one.host.name] == TRAINER),
        _servers(chosen, role_of, options.roles.roles),
        tuple(name for name, role in role_of.items() if not role),
    )


def _select(hosts: Sequence[Host], options: Options) -> tuple[Selected, ...]:
    return select(
        hosts,
        include=options.include,
        exclude=options.exclude,
        num_nodes=options.num_nodes,
        num_gpus=options.num_gpus,
    )


def _check_choice(chosen: Sequence[Selected], role_of: Mapping[str, str], options: Options) -> None:
    """Errors: LaunchError if --include or --exclude leaves out a server's host, or all trainers"""
    name = "--include" if options.include else "--exclude"
    names = {one.host.name for one in chosen}
    for host, role in role_of.items():
        if role not in ("", TRAINER) and host not in names:
            raise LaunchError(
                f"{name} {options.include or options.exclude!r} leaves out {host}, which has the role "
                f"{role}; choose it too, or give the role another host"
            )
    if all(role_of[one] != TRAINER for one in names):
        raise LaunchError(
            f"{name} {options.include or options.exclude!r} leaves no host to the trainers, which run "
            f"{options.program}; choose one of theirs, too"
        )


class _Placed(NamedTuple):
    """The role of a host, the devices that were named with it (None: all), and the option that says so."""

    role: str
    devices: tuple[str, ...] | None = None
    given: str = ""


def _placed(hosts: Sequence[Host], options: RoleOptions) -> dict[str, _Placed]:
    """Return the hosts that have a role, by name. Errors: LaunchError as divide()"""
    found: dict[str, _Placed] = {}
    for one in options.named:
        named = named_hosts(one.hosts, hosts, option=f"--role {one.name}") if one.hosts else {}
        for name, devices in named.items():
            _place(found, name, _Placed(one.name, devices, one.given))
    known = {one.name for one in options.named} | {TRAINER}
    for host in hosts:
        if host.role and host.role not in known:
            raise LaunchError(
                f"host {host.name} has role={host.role} in the hostfile, and no --role gives {host.role} a "
                f'command; add --role {host.role} "COMMAND", or remove the key'
            )
        if host.role:
            _place(found, host.name, _Placed(host.role, None, f"role={host.role} in the hostfile"))
    for one in options.servers:
        if all(placed.role != one.name for placed in found.values()):
            raise LaunchError(
                f"{one.given} has no host: none has role={one.name} in the hostfile; add the key there, or "
                f"name hosts, as in --role {one.name}=node5"
            )
    return found if options.is_on else {}


def _place(found: dict[str, _Placed], name: str, placed: _Placed) -> None:
    before = found.setdefault(name, placed)
    if before.role != placed.role:
        raise LaunchError(
            f"host {name} has two roles, by {before.given} and by {placed.given}, and a host has one; leave "
            "it out of one of them, or give the machine two lines in the hostfile, under two of its names "
            "and with different devices="
        )


def _with_devices(one: Selected, placed: _Placed | None) -> Selected:
    """Return the host with the devices that its role names, as far as it has them here."""
    if placed is None or placed.devices is None:
        return one
    return one._replace(devices=tuple(device for device in one.devices if device in placed.devices))


def _servers(
    chosen: Sequence[Selected], role_of: Mapping[str, str], roles: Sequence[Role]
) -> tuple[Server, ...]:
    found = []
    for role in roles:
        of_role = [one for one in chosen if role_of[one.host.name] == role.name]
        found += [Server(role, place, one) for place, one in enumerate(of_role)]
    return tuple(found)

"""Hosts whose ranks run in a container, and options that cannot be used with them."""

from __future__ import annotations

import os
import stat

from ..errors import LaunchError
from ..inputs.exec_prefix import prefix_of
from ..inputs.hostfile import Host
from ..job.plan import Plan
from ..options import Options


def with_prefix(hosts: tuple[Host, ...], options: Options) -> tuple[Host, ...]:
    """Give --exec_prefix to the hosts without one of their own in the hostfile.

    Errors: LaunchError for options that do not go together with a prefix
    """
    words = options.exec_prefix
    if words:
        hosts = tuple(
            one if one.exec_prefix is not None else one._replace(exec_prefix=prefix_of(words, one.name))
            for one in hosts
        )
    first = next((one for one in hosts if one.exec_prefix), None)
    if first is not None:
        _refuse_others(first, options)
    return hosts


def _refuse_others(host: Host, options: Options) -> None:
    given = "--exec_prefix" if options.exec_prefix else f"exec_prefix= of {host.name}"
    launcher = options.backend.launcher
    if launcher.starts_itself:
        raise LaunchError(
            f"{given} and --launcher={launcher.name} exclude each other: only SSH, and this machine, give a "
            "prefix the two-way stream that it needs; use --launcher=ssh or openssh"
        )
    if options.process.saves_pid:
        raise LaunchError(
            f"{given} and --save_pid exclude each other: a process has another number in a container than on "
            "its host; leave --save_pid out"
        )


def lost_input(plan: Plan) -> str:
    """Return a warning for input of ours that the only rank would read without its prefix; else empty."""
    (node, *others) = plan.nodes
    if others or len(node.ranks) > 1 or not node.is_local or not node.host.exec_prefix:
        return ""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    return "standard input is not read: a prefix passes none on to the ranks; give them the path of a file"

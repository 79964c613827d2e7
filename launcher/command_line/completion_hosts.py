"""The hosts that can be completed behind --include and --exclude."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from importlib import import_module

import click

from ..inputs.host import is_ipv6
from ..options import Options
from ..run.host_pool import named_hosts
from .cli import COMMANDS, dslaunch
from .prefix_command import PrefixCommand


def completed_hosts(value: str, typed: Sequence[str]) -> list[str]:
    """What the value of --include may become, with what was typed of it in front.

    `typed` are the words behind `dslaunch`, as a shell has them, quotes included. The hosts are those of the
    --hostfile among them, else of the default one. Behind the ':' of a host stand its slots, of which
    nothing is offered.
    Errors: click.UsageError and LaunchError, if there is no hostfile or it cannot be read
    """
    before, at, last = value.rpartition("@")
    if ":" in last.rpartition("]")[2]:
        return []
    hostfile = _hostfile(typed)
    named = None if hostfile == "-" else named_hosts(Options(program="", hostfile=hostfile))
    if named is None:
        return []
    taken = {one.partition(":")[0] for one in before.split("@")}
    names = [f"[{one.name}]" if is_ipv6(one.name) else one.name for one in named.hosts]
    return [f"{before}{at}{name}" for name in names if name.startswith(last) and name not in taken]


def _hostfile(typed: Sequence[str]) -> str | None:
    words = [_unquoted(word) for word in typed]
    command: click.Command = dslaunch
    if words and words[0] in COMMANDS:
        command = import_module(COMMANDS[words[0]], __package__).command
        words = words[1:]
    if not isinstance(command, PrefixCommand):
        return None
    with click.Context(command, info_name="dslaunch", **command.context_settings) as context:
        given = command.typed_value(context, words, "hostfile")
    return given and os.path.expandvars(os.path.expanduser(given))


def _unquoted(word: str) -> str:
    try:
        return " ".join(shlex.split(word))
    except ValueError:  # a quote that is still open
        return word

"""Roles: servers that run beside the trainers of a job, each on hosts of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..errors import LaunchError
from ..inputs.host import ROLE_RULE, is_role
from .backend import Launcher
from .number import Seconds
from .option import option, record

TRAINER = "trainer"  # the role of the hosts that run the job's own program
EXAMPLE = '--role rollout=node5 "vllm serve model --port 8000"'
MAX_RESTARTS = 1000
_MAX_PORT = 65535


class NamedRole(NamedTuple):
    """One --role. `hosts` are as for --include; empty: those with role=NAME in the hostfile. `command` is
    empty for the trainers, whose program is the job's.
    """

    name: str
    hosts: str
    command: str

    @property
    def given(self) -> str:
        """Return the option as it was given, without the command."""
        return f"--role {self.name}={self.hosts}" if self.hosts else f"--role {self.name}"


class Health(NamedTuple):
    """The question whether a server is healthy. `path` is empty if a connection to the port is enough, and
    `host` if the server's own host is asked at each of its addresses.
    """

    host: str
    port: int
    path: str

    @property
    def text(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.path}" if self.path else f"port {self.port}"


class Role(NamedTuple):
    """A command that runs once on each host of its role. `health` None: a server counts as healthy when it is
    started. `max_restarts` are those of each server; with `may_end` a server may end with 0 before the
    trainers do.
    """

    name: str
    command: str
    health: Health | None = None
    max_restarts: int = 0
    may_end: bool = False


def takes_command(value: str) -> bool:
    """Tell whether the word behind this value of --role is its command."""
    name = value.partition("=")[0]
    return name != TRAINER and not any(map(str.isspace, value))


def _read_roles(values: Sequence[str]) -> tuple[NamedRole, ...]:
    found: dict[str, NamedRole] = {}
    for value in values:
        one = _read_role(value)
        if one.name in found:
            raise ValueError(
                f"role {one.name} is given twice; give it once, with its hosts joined by '@': "
                f"--role {one.name}=node5@node6"
            )
        found[one.name] = one
    return tuple(found.values())


def _read_role(value: str) -> NamedRole:
    head, _, command = value.strip().partition(" ")
    name, equals, hosts = head.partition("=")
    if not is_role(name):
        raise ValueError(f"{name[:80]!r}: the name of a role {ROLE_RULE}; write e.g. {EXAMPLE}")
    if equals and not hosts:
        raise ValueError(f"{head!r} names no host; write hosts as for --include: {EXAMPLE}")
    if name == TRAINER and command:
        raise ValueError(
            f"{TRAINER} is the role of the job's own program and takes no command, but {command[:80]!r} "
            f"stands behind it; write --role {head}"
        )
    if name == TRAINER and not hosts:
        raise ValueError(f"{TRAINER} without hosts says nothing; write --role {TRAINER}=node[1-4]")
    if name != TRAINER and not command.strip():
        raise ValueError(
            f"role {name} has no command, which stands behind its hosts as one word; write e.g. "
            f'--role {head} "vllm serve model --port 8000"'
        )
    return NamedRole(name, hosts, command.strip())


def _pairs(values: Sequence[str], example: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not rest or not is_role(name):
            raise ValueError(f"{value!r} is not ROLE=VALUE; write e.g. {example}")
        if name in found:
            raise ValueError(f"{name} is given twice; give it once, e.g. {example}")
        found[name] = rest
    return found


def _read_health(values: Sequence[str]) -> tuple[tuple[str, Health], ...]:
    return tuple(
        (name, _health_of(text)) for name, text in _pairs(values, "rollout=http://:8000/health").items()
    )


def _health_of(text: str) -> Health:
    why = (
        f"{text!r} is neither a port nor an http address with one; write e.g. rollout=8000 for a port that "
        "answers, or rollout=http://:8000/health for a page that answers with 200"
    )
    if text.isascii() and text.isdigit():
        if not 1 <= int(text[:9]) <= _MAX_PORT:
            raise ValueError(f"port {text[:9]} is not from 1 to {_MAX_PORT}; write e.g. rollout=8000")
        return Health("", int(text), "")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(why) from None
    if (
        parts.scheme != "http"
        or not port
        or parts.username is not None
        or re.search(r"[\s\x00-\x1f\ud800-\udfff]", text)
    ):
        raise ValueError(why)
    query = f"?{parts.query}" if parts.query else ""
    return Health(parts.hostname or "", port, (parts.path or "/") + query)


def _read_restarts(values: Sequence[str]) -> tuple[tuple[str, int], ...]:
    found = []
    for name, text in _pairs(values, "rollout=3").items():
        if not (text.isascii() and text.isdigit()) or int(text[:9]) > MAX_RESTARTS:
            raise ValueError(
                f"{name}={text}: restarts are a whole number from 0 to {MAX_RESTARTS}; write e.g. {name}=3"
            )
        found.append((name, int(text)))
    return tuple(found)


@record
class RoleOptions(NamedTuple):
    """The roles of a job; without any, all hosts are trainers."""

    named: tuple[NamedRole, ...] = option(
        "--role",
        topic="roles",
        default=(),
        multiple=True,
        takes_next=takes_command,
        read=_read_roles,
        metavar="NAME=HOSTS",
        help=(
            'A server beside the trainers: --role NAME=HOSTS "COMMAND" runs COMMAND once on each of HOSTS. '
            f"{TRAINER}=HOSTS names the hosts of SCRIPT.  [default: all that no role names]"
        ),
    )
    health: tuple[tuple[str, Health], ...] = option(
        "--role_health",
        topic="roles",
        needs="--role",
        default=(),
        multiple=True,
        read=_read_health,
        metavar="ROLE=URL",
        help=(
            "Start the trainers when each server of ROLE answers: a port, or http://:8000/health, asked on "
            "its own host."
        ),
    )
    health_timeout_s: float = option(
        "--role_timeout",
        topic="roles",
        needs="--role_health",
        default=600.0,
        type=Seconds(1),
        metavar="S",
        help="Seconds that a server has to become healthy.  [default: 600]",
    )
    restarts: tuple[tuple[str, int], ...] = option(
        "--role_restarts",
        topic="roles",
        needs="--role",
        default=(),
        multiple=True,
        read=_read_restarts,
        metavar="ROLE=N",
        help="Start a server of ROLE that ends again on its host, N times, while the trainers go on.",
    )
    may_end: tuple[str, ...] = option(
        "--role_may_end",
        topic="roles",
        needs="--role",
        default=(),
        multiple=True,
        metavar="ROLE",
        help="A server of ROLE may end with 0 while the trainers run; otherwise that fails the job.",
    )

    @property
    def is_on(self) -> bool:
        return bool(self.named)

    @property
    def servers(self) -> tuple[NamedRole, ...]:
        """Return the roles with a command."""
        return tuple(one for one in self.named if one.name != TRAINER)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Return the same with all that is said of them."""
        health, restarts = dict(self.health), dict(self.restarts)
        return tuple(
            Role(
                name=one.name,
                command=one.command,
                health=health.get(one.name),
                max_restarts=restarts.get(one.name, 0),
                may_end=one.name in self.may_end,
            )
            for one in self.servers
        )

    def settled(self, given: Mapping[str, Any]) -> RoleOptions:
        """Settle the options. Errors: LaunchError for an option about a role that has no command"""
        names = [one.name for one in self.servers]
        for option_name, used in (
            ("--role_health", [name for name, _ in self.health]),
            ("--role_restarts", [name for name, _ in self.restarts]),
            ("--role_may_end", list(self.may_end)),
        ):
            for name in used:
                if name not in names:
                    known = f"; the roles with one are {', '.join(names)}" if names else ""
                    raise LaunchError(
                        f"{option_name}={name}: no --role gives {name} a command{known}; write e.g. {EXAMPLE}"
                    )
        if self.named and not names:
            raise LaunchError(
                f"{self.named[0].given} is the only role in front of the script, and the trainers need "
                f"none, nor a command behind it; choose hosts with --include, or add a server: {EXAMPLE}"
            )
        return self

    def check(self, launcher: Launcher, *, no_ssh: bool) -> None:
        """Errors: LaunchError where this process does not start and watch what runs on the hosts"""
        if self.is_on and (no_ssh or launcher.starts_itself):
            what = "--no_ssh" if no_ssh else f"--launcher={launcher.name}"
            raise LaunchError(
                f"--role has no effect with {what}, where no connection leads from here to the hosts, so no "
                "server could be watched; leave it out, or use --launcher=ssh"
            )

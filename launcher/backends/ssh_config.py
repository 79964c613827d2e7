"""SSH targets: host, user, port and keys, from the hostfile, the command line and OpenSSH's configuration."""

from __future__ import annotations

import getpass
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from ..inputs.hostfile import Host
from ..options.hosts import SshOptions
from .known_hosts import NO_FILE
from .openssh_config import ConfigLine, Me, Values, expand, family_of, read_file, settings_of, tokens_of
from .openssh_only import OpenSshHints, algorithms_of, hints_of

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
# Used if no key is named
USUAL_IDENTITIES = tuple(f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519"))
CONNECT_TIMEOUT_S = 10.0
MAX_DEPTH = 8  # the most jump hosts that are themselves reached through jump hosts
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:]+)(?::(?P<port>\d+))?")
_SECONDS = re.compile(r"(\d+)([smhdw]?)", re.IGNORECASE)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class Target(NamedTuple):
    """One SSH connection, fully resolved. `jumps` are the hosts to go through, nearest first."""

    address: str
    port: int
    user: str
    identities: tuple[str, ...]  # private key files, existing or not
    has_only_these_identities: bool
    host_key_name: str  # the host's name in known_hosts
    known_hosts: tuple[str, ...]
    unknown_host_keys: str  # "refuse", or "add" (StrictHostKeyChecking accept-new and no)
    proxy_command: str | None
    jumps: tuple[Target, ...]
    connect_timeout_s: float
    family: socket.AddressFamily = socket.AF_UNSPEC
    agent: str | None = None  # the socket of the ssh-agent; empty: none
    openssh: OpenSshHints = OpenSshHints()  # why the system's ssh may get in where ours does not
    portless_key_name: str = ""  # the host without its port, if host_key_name has one
    checks_address: bool = False  # the keys in known_hosts for the host's address count too (CheckHostIP)
    algorithms: tuple[tuple[str, str], ...] = ()  # lists of the configuration, by paramiko's options


class Configuration:
    """OpenSSH's files and the options, for all hosts of a job; each file is read once."""

    def __init__(self, options: SshOptions) -> None:
        """Read the files. Errors: LaunchError if a file cannot be read."""
        self.options = options
        self.me = Me(getpass.getuser(), str(Path.home()), socket.gethostname())
        self._files = _read_files(options)

    def resolve(self, host: Host) -> Target:
        """Return the target of a host.

        Errors: LaunchError if a configuration file cannot be understood.
        Source: ssh_config(5); the first value found wins: hostfile, command line, configuration, default.
        """
        options = self.options
        return _resolve(host.name, host.user or options.user, host.port or options.port, self, depth=0)

    def lookup(self, name: str, user: str | None, port: int | None) -> Values:
        """Return the files' settings for `name`, keys in lower case.

        Errors: LaunchError if they cannot be understood.
        """
        given: Values = {key: (str(value),) for key, value in (("user", user), ("port", port)) if value}
        found = settings_of(name, given, self._files, self.me)
        return {**found, "port": (str(_port(found.get("port", ("22",))[0])),)}


def given_identity(options: SshOptions) -> str | None:
    """Return the file of --ssh_identity, if it was given. Errors: LaunchError if it is missing"""
    if not options.identity:
        return None
    path = Path(options.identity).expanduser()
    if not path.is_file():
        raise LaunchError(
            f"--ssh_identity={options.identity}: there is no such file; give a private key, or "
            "leave the option out"
        )
    return str(path)


def _resolve(
    name: str, user: str | None, port: int | None, configuration: Configuration, *, depth: int
) -> Target:
    if depth > MAX_DEPTH:
        raise LaunchError(
            f"ssh configuration: ProxyJump of {name} leads through more than {MAX_DEPTH} "
            "hosts; is it a circle?"
        )
    options = configuration.options
    found = configuration.lookup(name, user, port)
    tokens = tokens_of(name, found, configuration.me)
    address, real_port, login = (tokens[key] for key in "hpr")
    jump, command = (found.get(key, ("none",))[0] for key in ("proxyjump", "proxycommand"))
    alias = found["hostkeyalias"][0] if "hostkeyalias" in found else address
    has_port = real_port != "22" and "hostkeyalias" not in found
    known_hosts = (
        *(_known_hosts(one, tokens) for one in found.get("userknownhostsfile", USER_KNOWN_HOSTS.split())),
        *(_known_hosts(one, tokens) for one in found.get("globalknownhostsfile", SYSTEM_KNOWN_HOSTS.split())),
    )
    jumps = () if jump.lower() == "none" else _resolve_jumps(jump, configuration, depth=depth + 1)
    if jumps and jumps[-1][:3] == (address, int(real_port), login):
        raise LaunchError(f"ssh configuration: ProxyJump of {name} leads to {name} itself; is it a circle?")
    has_own_timeout = options.connect_timeout_s is None and "connecttimeout" in found
    identities = _identities(options, found, tokens)
    return Target(
        address=address,
        port=int(real_port),
        user=login,
        identities=identities,
        has_only_these_identities=_is_yes(found, "identitiesonly"),
        host_key_name=f"[{alias.lower()}]:{real_port}" if has_port else alias.lower(),
        known_hosts=known_hosts,
        unknown_host_keys="refuse"
        if known_hosts[0] == NO_FILE
        else _unknown_host_keys(found.get("stricthostkeychecking", ("ask",))[0].lower()),
        proxy_command=None
        if command.lower() == "none"
        else expand(command, {key: tokens[key] for key in "hnpr"}),
        jumps=jumps,
        connect_timeout_s=_seconds(found["connecttimeout"][0])
        if has_own_timeout
        else options.connect_timeout_s or CONNECT_TIMEOUT_S,
        family=family_of(found),
        agent=_agent(found, tokens),
        openssh=hints_of(found, tokens, identities),
        portless_key_name=alias.lower() if has_port else "",
        checks_address=_is_yes(found, "checkhostip"),
        algorithms=algorithms_of(found),
    )


def _resolve_jumps(text: str, configuration: Configuration, *, depth: int) -> tuple[Target, ...]:
    """Return all hosts on the way. The first one may have jump hosts of its own; the others are reached
    through the one before.
    """
    jumps = tuple(_resolve_jump(one, configuration, depth=depth) for one in text.split(",") if one.strip())
    return (*jumps[0].jumps, *jumps) if jumps else ()


def _resolve_jump(text: str, configuration: Configuration, *, depth: int) -> Target:
    match = _JUMP.fullmatch(text.strip())
    if match is None:
        raise LaunchError(f"ssh configuration: ProxyJump {text!r} is not [user@]host[:port]")
    port = int(match["port"]) if match["port"] else None
    return _resolve(match["host"].strip("[]"), match["user"], port, configuration, depth=depth)


def _identities(options: SshOptions, found: Values, tokens: dict[str, str]) -> tuple[str, ...]:
    """Return the key files: that of the option first, then those of the configuration; without any, those
    that ssh looks for.
    """
    option = given_identity(options)
    given = [] if option is None else [option]
    named = found.get("identityfile", () if given else USUAL_IDENTITIES)
    return tuple(dict.fromkeys((*given, *(_path(one, tokens) for one in named if one.lower() != "none"))))


def _agent(found: Values, tokens: dict[str, str]) -> str | None:
    given = found.get("identityagent", ("SSH_AUTH_SOCK",))[0]
    if given == "SSH_AUTH_SOCK":
        return None
    if given.lower() == "none":
        return ""
    return os.environ.get(given[1:], "") if re.fullmatch(r"\$\w+", given) else _path(given, tokens)


def _path(text: str, tokens: dict[str, str]) -> str:
    return str(Path(expand(text, tokens, has_variables=True)).expanduser())


def _known_hosts(text: str, tokens: dict[str, str]) -> str:
    return NO_FILE if text.lower() == NO_FILE else _path(text, tokens)


def _read_files(options: SshOptions) -> tuple[tuple[ConfigLine, ...], ...]:
    """Return the lines of the existing configuration files, the first one counting most."""
    own = Path("~/.ssh").expanduser()
    given = [(own / "config", own, True), (SYSTEM_CONFIG, SYSTEM_CONFIG.parent, False)]
    if options.config:
        given = [(Path(options.config), own, False)]
    found = []
    for path, folder, must_be_secure in given:
        try:
            found.append(read_file(path, include_from=folder, must_be_secure=must_be_secure))
        except FileNotFoundError:
            if options.config:
                raise LaunchError(f"--ssh_config={options.config}: there is no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise LaunchError(f"{path}: cannot be used as an ssh configuration: {why}") from None
    return tuple(found)


def _port(value: str) -> int:
    if value.isdecimal() and 0 < int(value) <= 65535:
        return int(value)
    try:
        return socket.getservbyname(value, "tcp")
    except OSError:
        raise LaunchError(
            f"ssh configuration: port {value!r} is not a whole number from 1 to 65535"
        ) from None


def _seconds(value: str) -> float:
    """Read seconds as ssh takes them: `10`, `1m30s`; `none` means our default."""
    if value.lower() == "none":
        return CONNECT_TIMEOUT_S
    parts = _SECONDS.findall(value)
    if not parts or "".join(map("".join, parts)) != value:
        raise LaunchError(f"ssh configuration: connecttimeout {value!r} is not a whole number of seconds")
    return sum(int(number) * _UNITS[unit.lower()] for number, unit in parts) or CONNECT_TIMEOUT_S


def _is_yes(found: Values, key: str) -> bool:
    return found.get(key, ("no",))[0].lower() in ("yes", "true")


def _unknown_host_keys(strict: str) -> str:
    return "add" if strict in ("no", "off", "false", "accept-new") else "refuse"

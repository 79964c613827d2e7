"""Where and as whom to connect: the hostfile, the command line and OpenSSH's configuration put together."""

from __future__ import annotations

import getpass
import glob
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .errors import LaunchError
from .hostfile import Host
from .lean_paramiko import lean_paramiko
from .options.hosts import SshOptions

if TYPE_CHECKING:
    import paramiko

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
CONNECT_TIMEOUT_S = 10.0
MAX_DEPTH = 8  # of jumps through jumps, and of files that include files
_INCLUDE = re.compile(r"\s*include(?:\s+|\s*=\s*)(?P<patterns>.+?)\s*", re.IGNORECASE)
_BLOCK = re.compile(
    r"\s*(?:host|match)\b(?!\s*=?\s*(?:\*|all)\s*$)", re.IGNORECASE
)  # all but `Host *`, `Match all`
_EXEC = re.compile(r"\s*match\b.*\bexec\b", re.IGNORECASE)
_SETTING = re.compile(r"(\w+)(?:\s*=\s*|\s+)(.+)")  # as paramiko takes a line apart
_USED = frozenset(  # what makes a difference here
    (
        *("user", "port", "hostname", "hostkeyalias", "identityfile", "identitiesonly", "userknownhostsfile"),
        *("stricthostkeychecking", "proxyjump", "proxycommand", "connecttimeout", "match"),
        *("canonicalizehostname", "canonicalizemaxdots"),
    )
)
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:]+)(?::(?P<port>\d+))?")


class Target(NamedTuple):
    """One SSH connection, fully resolved. `jumps` are the hosts to go through, nearest first."""

    address: str
    port: int
    user: str
    identities: tuple[str, ...]  # private key files
    has_only_these_identities: bool
    host_key_name: str  # how known_hosts names it
    known_hosts: tuple[str, ...]
    unknown_host_keys: str  # "refuse", "add" (StrictHostKeyChecking=accept-new) or "accept" (=no)
    proxy_command: str | None
    jumps: tuple[Target, ...]
    connect_timeout_s: float


class Configuration:
    """What OpenSSH's files and the options say, for all hosts of a job; each file is read once."""

    def __init__(self, options: SshOptions) -> None:
        """Errors: LaunchError if a file cannot be read."""
        self.options = options
        self._files = _read_files(options)
        lines = [line.strip() for _, lines in self._files for line in lines]
        # Without use on most machines; so the connections are begun before paramiko is loaded: see dial.py.
        self._is_of_use = not all(_says_nothing(line) for line in lines)
        self._has_exec = any(_EXEC.match(line) for line in lines)
        self._parsed: dict[tuple[str | None, int | None], paramiko.SSHConfig] = {}

    def resolve(self, host: Host) -> Target:
        """How to reach a host.

        Errors: LaunchError if a configuration file cannot be understood.
        Source: ssh_config(5); the first value found wins: hostfile, command line, configuration, default.
        """
        options = self.options
        return _resolve(host.name, host.user or options.user, host.port or options.port, self, depth=0)

    def lookup(self, name: str, user: str | None, port: int | None) -> dict[str, str | list[str]]:
        """What the files say of `name`, keys in lower case."""
        if not self._is_of_use:
            return {}
        with lean_paramiko(needs_invoke=self._has_exec):
            import paramiko  # here, because many jobs do not need it, or not yet: 50 ms

        if (user, port) not in self._parsed:
            self._parsed[user, port] = self._parse(user, port)
        try:
            return dict(self._parsed[user, port].lookup(name))
        except (paramiko.SSHException, ImportError) as error:
            raise LaunchError(f"ssh configuration: what it says of {name} cannot be used: {error}") from None

    def _parse(self, user: str | None, port: int | None) -> paramiko.SSHConfig:
        import paramiko  # as above

        config = paramiko.SSHConfig()
        if user or port:  # said first, so that %r and %p in a ProxyCommand mean them
            said = [f"User {user}"] * bool(user) + [f"Port {port}"] * bool(port)
            config.parse(["Host *", *said])
        for path, lines in self._files:
            try:
                config.parse(lines)
            except paramiko.ConfigParseError as error:
                raise _unusable(path, error) from None
        return config


def _resolve(
    name: str, user: str | None, port: int | None, configuration: Configuration, *, depth: int
) -> Target:
    if depth > MAX_DEPTH:
        raise LaunchError(
            f"ssh configuration: ProxyJump of {name} leads through more than {MAX_DEPTH} hosts; is it a circle?"
        )
    options = configuration.options
    found = configuration.lookup(name, user, port)
    address = str(found.get("hostname", name))
    real_port = port or int(_number(found, "port", 22))
    if options.identity and not Path(options.identity).expanduser().is_file():
        raise LaunchError(
            f"--ssh_identity={options.identity}: there is no such file; give a private key, or leave the option out"
        )
    identities = [str(Path(options.identity).expanduser())] if options.identity else []
    identities += [str(Path(one).expanduser()) for one in found.get("identityfile", ())]
    jump = "" if str(found.get("proxyjump", "none")).lower() == "none" else str(found["proxyjump"])
    command = str(found.get("proxycommand", "none"))
    known_hosts = str(found.get("userknownhostsfile", USER_KNOWN_HOSTS)).split()
    alias = str(found.get("hostkeyalias", address)).lower()
    return Target(
        address=address,
        port=real_port,
        user=user or str(found.get("user", getpass.getuser())),
        identities=tuple(identities),
        has_only_these_identities=_is_yes(found, "identitiesonly"),
        host_key_name=alias if real_port == 22 or "hostkeyalias" in found else f"[{alias}]:{real_port}",
        known_hosts=(*(str(Path(one).expanduser()) for one in known_hosts), *SYSTEM_KNOWN_HOSTS),
        unknown_host_keys=_unknown_host_keys(str(found.get("stricthostkeychecking", "ask")).lower()),
        proxy_command=None if command.lower() == "none" or jump else command,
        jumps=_resolve_jumps(jump, configuration, depth=depth + 1),
        connect_timeout_s=options.connect_timeout_s or _number(found, "connecttimeout", CONNECT_TIMEOUT_S),
    )


def _resolve_jumps(text: str, configuration: Configuration, *, depth: int) -> tuple[Target, ...]:
    """All hosts on the way. The first one may have a way of its own; the others are reached through it."""
    jumps = tuple(_resolve_jump(one, configuration, depth=depth) for one in text.split(",") if one.strip())
    return (*jumps[0].jumps, *jumps) if jumps else ()


def _resolve_jump(text: str, configuration: Configuration, *, depth: int) -> Target:
    match = _JUMP.fullmatch(text.strip())
    if match is None:
        raise LaunchError(f"ssh configuration: ProxyJump {text!r} is not [user@]host[:port]")
    port = int(match["port"]) if match["port"] else None
    return _resolve(match["host"].strip("[]"), match["user"], port, configuration, depth=depth)


def _says_nothing(line: str) -> bool:
    """Whether a line is none, or a setting of no use here. What cannot be understood is left to paramiko to refuse."""
    setting = _SETTING.match(line)
    if setting is None:
        return not line or line.startswith("#")
    key = setting[1].lower()
    return setting[2] == "*" if key == "host" else key not in _USED


def _read_files(options: SshOptions) -> list[tuple[Path, list[str]]]:
    """The configuration files that are there, the first one counting most."""
    given = [Path(options.config)] if options.config else [Path("~/.ssh/config").expanduser(), SYSTEM_CONFIG]
    found = []
    for path in given:
        try:
            found.append((path, _lines(path, depth=0)))
        except FileNotFoundError:
            if options.config:
                raise LaunchError(f"--ssh_config={options.config}: there is no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise _unusable(path, error) from None
    return found


def _unusable(path: Path, error: Exception) -> LaunchError:
    return LaunchError(f"{path}: cannot be used as an ssh configuration: {error}")


def _lines(path: Path, *, depth: int) -> list[str]:
    """The lines of a configuration file, with the files it includes in place (paramiko passes over Include).

    Errors: LaunchError for an Include inside a Host block, where it would hold for some hosts only, or a circle
    """
    if depth > MAX_DEPTH:
        raise LaunchError(f"{path}: Include leads through more than {MAX_DEPTH} files; is it a circle?")
    found: list[str] = []
    block = ""
    for line in path.read_text().splitlines():
        include = _INCLUDE.fullmatch(line)
        if include is None:
            block = line.strip() if _BLOCK.match(line) else block
            found.append(line)
            continue
        if block:
            raise LaunchError(
                f"{path}: {line.strip()!r} inside {block!r} is not supported; put it at the top"
            )
        for pattern in shlex.split(include["patterns"]):
            for name in sorted(glob.glob(str(Path("~/.ssh").expanduser() / Path(pattern).expanduser()))):
                found += _lines(Path(name), depth=depth + 1)
        found.append("Host *")  # what follows holds for all hosts again
    return found


def _number(found: dict[str, str | list[str]], key: str, default: float) -> float:
    if key not in found:
        return default
    value = str(found[key])
    if not value.isdecimal():
        raise LaunchError(f"ssh configuration: {key} {value!r} is not a whole number")
    return int(value)


def _is_yes(found: dict[str, str | list[str]], key: str) -> bool:
    return str(found.get(key, "no")).lower() == "yes"


def _unknown_host_keys(strict: str) -> str:
    return {"no": "accept", "off": "accept", "accept-new": "add"}.get(strict, "refuse")

"""Errors of an `ssh` program that could not connect, in our words: why, and what to do."""

from __future__ import annotations

import os
import re
import shlex

from ..errors import EXIT_HOST, LaunchError
from .openssh_strict import Facts

CONNECTION_FAILED = 255  # the exit status of an ssh that could not connect, or lost its connection


class Dropped(LaunchError):
    """The connection ended before the login did; sshd does that at too many logins at the same time."""


_CHANGED = re.compile(r"REMOTE HOST IDENTIFICATION HAS CHANGED")
_REVOKED = re.compile(r"REVOKED HOST KEY DETECTED|Host key \S+ \S+ revoked by file")
_FINGERPRINT = re.compile(
    r"fingerprint for the (?P<kind>\S+) key sent by the remote host is\s+(?P<print>\S+?)\.?\s"
)
_OFFENDING = re.compile(r"^Offending .*key.* in (?P<file>.+):\d+\r?$", re.MULTILINE)
_UNKNOWN = re.compile(
    r"Host key verification failed|No matching host key fingerprint found|No \S+ host key is known for"
)
_DENIED = re.compile(r"^(?:(?P<login>\S+@\S+): )?Permission denied \((?P<methods>[^)]*)\)", re.MULTILINE)
_NEGOTIATE = re.compile(
    r"Unable to negotiate with (?P<host>\S+) port (?P<port>\S+): no matching (?P<what>.+?) found"
    r"(?:\. Their offer: (?P<offer>.*))?"
)
_NAME = re.compile(r"Could not resolve hostname (?P<host>\S+): (?P<why>.*)")
_CONNECT = re.compile(r"connect to host (?P<host>\S+) port (?P<port>\d+): (?P<why>.*)")
_SILENT = re.compile(r"Connection timed out during banner exchange|Connection to \S+ port \d+ timed out")
_NO_SSH = re.compile(r"banner exchange: .*(?:invalid format|line too long)|Protocol major versions differ")
_MANY = re.compile(r"Too many authentication failures")
_CONFIGURATION = re.compile(
    r"^(?:\S+:? line \d+: (?:Bad|keyword|[Mm]issing|[Uu]nsupported|[Nn]o argument|[Ii]nvalid|garbage).*"
    r"|Bad owner or permissions on .*|Can't open user config file .*|command-line.*|unknown option .*"
    r"|usage: ssh .*|.*percent_expand: unknown key .*|ControlPath too long.*)$",
    re.MULTILINE,
)
_DROPPED = re.compile(
    r"(?:kex|ssh)_exchange_identification: .*|banner exchange: .*"
    r"|Connection (?:closed|reset) by .*"
    r"|Received disconnect from .*|Disconnected from .*|ssh_dispatch_run_fatal: .*"
    r"|read: Connection reset by peer"
)
_OF_SSH = re.compile(
    r"(?:Connection (?:to|closed|reset)|client_loop: |Read from remote host |Write failed|packet_write"
    r"|Timeout, server|Shared connection to|mux_client_|ssh_dispatch_run_fatal|Killed by signal"
    r"|Control socket).*"
)

# Remedies for a refused login, by the method that the host takes.
_HELP = {
    "gssapi-with-mic": "renew the Kerberos ticket (kinit)",
    "publickey": "allow a key there, or load it with ssh-add",
    "keyboard-interactive": "open a connection that is shared, which may ask: ssh -fNM HOST, with "
    "ControlPath in the ssh configuration",
}
_HELP["password"] = _HELP["keyboard-interactive"]
_WAYS = {"proxycommand": "ProxyCommand", "proxyjump": "ProxyJump"}
_SETTINGS = {
    "key exchange method": "KexAlgorithms",
    "host key type": "HostKeyAlgorithms",
    "cipher": "Ciphers",
    "MAC": "MACs",
    "compression": "Compression",
}


def is_of_ssh(line: str) -> bool:
    """Tell whether this line is ssh's own word for the end of the connection."""
    return _OF_SSH.fullmatch(line.strip()) is not None


def why_not(said: str, *, timeout_s: float, facts: Facts) -> LaunchError:
    """Return the reason why there was no login. `said` is the output of ssh, and of any ssh on the way
    through another host; `facts` are its configuration for the host.
    """
    if _REVOKED.search(said):
        return _host_error(
            "its host key is REVOKED (a @revoked line in known_hosts, or RevokedHostKeys): who has it may be "
            "an attacker; give the host a new key, and make that known"
        )
    if _CHANGED.search(said):
        return _host_error(_changed(said, facts))
    if _UNKNOWN.search(said):
        return _host_error(_unknown(facts))
    if found := _NEGOTIATE.search(said):
        what, offer = found["what"], found["offer"] or "nothing that it says"
        return _host_error(
            f"{found['host']} port {found['port']} and OpenSSH's ssh have no {what} in common: it offers "
            f"{offer}; allow one of these in the ssh configuration, or another in its sshd_config "
            f"({_SETTINGS.get(what, 'see ssh -Q help')})"
        )
    if found := _DENIED.search(said):
        return _host_error(_denied(found["login"], found["methods"], facts))
    if found := _NAME.search(said):
        return _host_error(f"the name {found['host']} is not known; correct the hostfile, DNS or /etc/hosts")
    if found := _CONNECT.search(said):
        return _host_error(
            _unconnected(f"{found['host']} port {found['port']}", found["why"].strip(), timeout_s)
        )
    if _SILENT.search(said):
        where = f"{facts.get('hostname', 'it')} port {facts.get('port', '22')}"
        return _host_error(
            f"{where} accepted the connection but does not speak SSH: silent for {timeout_s:.0f} s; is "
            "sshd there stopped, or out of memory?"
        )
    if found := _NO_SSH.search(said):
        return _host_error(
            f"it accepted the connection but does not speak SSH: {found[0]}; is that port sshd's?"
        )
    if _MANY.search(said):
        return _host_error(
            "it refused the login because of too many keys that it does not know; name the right one with "
            "--ssh_identity, or with IdentityFile and IdentitiesOnly in the ssh configuration"
        )
    if found := _CONFIGURATION.search(said):
        return _host_error(
            f"OpenSSH's ssh cannot use what it is told: {found[0].strip()}; correct the ssh configuration"
        )
    return _other(said, facts)


def _other(said: str, facts: Facts) -> LaunchError:
    """Return the error for a connection that ended, or for output of ssh that is not recognized."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    drops = [found for found in map(_DROPPED.fullmatch, lines) if found]
    others = [line for line in lines if not _DROPPED.fullmatch(line)]
    if drops or not lines:
        way = next((key for key in ("proxycommand", "proxyjump") if facts.get(key, "none") != "none"), "")
        name = f"{_WAYS.get(way)} {facts.get(way)!r}"
        if way and others:
            return _host_error(
                f"{name} ended: {others[-1]}; correct it in the ssh configuration, or repair the way that it "
                "goes"
            )
        if way:
            return Dropped(
                f"{name} ended, or what it leads to ended the connection, and neither said why; correct it "
                "in the ssh configuration, or repair the way that it goes",
                exit_code=EXIT_HOST,
            )
    if not lines:
        return _host_error(
            "no agent started there: the login or the connection ended, and said nothing; a command must run "
            "there: test with ssh HOST true"
        )
    if drops:
        return Dropped(f"the connection ended during the login: {drops[0][0]}", exit_code=EXIT_HOST)
    return _host_error(f"OpenSSH's ssh could not connect: {lines[-1]}")


def _unconnected(where: str, why: str, timeout_s: float) -> str:
    if why == "Connection refused":
        return f"{where} refused the connection; is sshd running there, on this port?"
    if why in ("Connection timed out", "Operation timed out"):
        return f"{where} did not answer within {timeout_s:g} s; is the host up and not behind a firewall?"
    return f"cannot reach {where}: {why}"


def _changed(said: str, facts: Facts) -> str:
    found, offending = _FINGERPRINT.search(said), _OFFENDING.search(said)
    now = f": now {found['kind']} {found['print']}" if found else ""
    return (
        f"its host key has CHANGED{now}; this may be an attack; if the host was reinstalled: "
        f"{how_to_remove(_known_as(facts), offending['file'] if offending else '')} and add the new key"
    )


def _unknown(facts: Facts) -> str:
    port = facts.get("port", "22")
    option = "" if port == "22" else f"-p {port} "
    file = facts.get("userknownhostsfile", "~/.ssh/known_hosts").partition(" ")[0]
    scan = f"ssh-keyscan {option}{facts.get('hostname', 'HOST')}"
    return f"its host key is not known; if the right host answers there: {where_to_add(scan, file)}"


def how_to_remove(name: str, file: str) -> str:
    """Return the command that removes a host's keys from `file`: "" for ssh-keygen's own default."""
    default = os.path.expanduser("~/.ssh/known_hosts")
    option = "" if file in ("", default) else f"-f {shlex.quote(file)} "
    return f"ssh-keygen {option}-R '{name}'"


def where_to_add(scan: str, file: str) -> str:
    """Return what to do with the key that a command prints, and the first UserKnownHostsFile."""
    if file not in ("/dev/null", "none"):
        return f"{scan} >> {file}"
    return f"{scan} >> ~/.ssh/known_hosts, and take UserKnownHostsFile={file} out, which keeps no keys"


def _known_as(facts: Facts) -> str:
    if alias := facts.get("hostkeyalias"):
        return alias
    name, port = facts.get("hostname", "HOST"), facts.get("port", "22")
    return name if port == "22" else f"[{name}]:{port}"


def _denied(login: str | None, methods: str, facts: Facts) -> str:
    login = login or "@".join((facts.get("user", ""), facts.get("hostname", "HOST")))
    help_ = [_HELP[one] for one in methods.split(",") if one in _HELP]
    todo = ", or ".join(dict.fromkeys(help_)) or "allow another way there"
    return (
        f"{login} was refused (OpenSSH's ssh; that host takes {methods.replace(',', ', ')}); {todo}; "
        f"test with: ssh -o BatchMode=yes {login} true"
    )


def _host_error(message: str) -> LaunchError:
    return LaunchError(message, exit_code=EXIT_HOST)

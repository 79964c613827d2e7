"""One login over SSH: the key exchange, the host's key, and the user's keys. It never asks a question."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import IncompatiblePeer

from ..errors import EXIT_HOST, LaunchError
from ..inputs.named_file import read_named
from .known_hosts import HostKey, HostNames, KeyFinding, KnownHosts, Standing, can_be_written
from .openssh_only import kept
from .openssh_words import Dropped, how_to_remove, where_to_add
from .ssh_config import Target

logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # we report its errors ourselves, once


_OF_OPENSSH = ("gssapi-with-mic", "gssapi-keyex", "hostbased")  # methods of login that ask the user nothing
_SHARE = "open a connection that OpenSSH shares (ssh -fNM HOST, with ControlPath in the ssh configuration)"


class OpenSshMay(LaunchError):
    """Our own SSH fails there, and OpenSSH may succeed. `because` says why, in words that follow a host's
    name.
    """

    def __init__(self, message: str, *, because: str) -> None:
        super().__init__(message, exit_code=EXIT_HOST)
        self.because = because


class UnusableKey(Exception):
    """A private key that is not used, and why."""


class _AgentKey(AgentKey):
    """A key of an ssh-agent that may refuse to sign with it: the agent asks its user first, or the token is
    not there.

    paramiko would end the connection at such a refusal. So the host is sent a signature that it rejects, and
    the next key is tried.
    """

    has_refused = False

    def sign_ssh_data(self, data: Any, algorithm: str | None = None) -> paramiko.Message:
        try:
            return super().sign_ssh_data(data, algorithm)
        except (paramiko.SSHException, OSError):
            self.has_refused = True
            refused = paramiko.Message()
            refused.add_string(algorithm or self.get_name())
            refused.add_string(bytes(64))
            return refused


class SshFiles:
    """Files that all connections of a job need, each read once. Any thread may use it."""

    def __init__(self, say: Callable[[str], None] = lambda line: None) -> None:
        """`say` gets notes for the user about a login that went well."""
        self.known_hosts = KnownHosts()
        self._say = say
        self._said: set[str] = set()
        self._keys: dict[str, paramiko.PKey | UnusableKey] = {}
        self._lock = threading.Lock()

    def say_once(self, line: str, host: str) -> None:
        """Print the line for the first host that needs it, and not again for others."""
        with self._lock:
            is_new = line not in self._said
            self._said.add(line)
        if is_new:
            self._say(f"{host}: {line}")

    def private_key(self, path: str) -> paramiko.PKey:
        """Read and check a key, which takes up to 0.1 s. Errors: UnusableKey with the reason"""
        with self._lock:
            if path not in self._keys:
                try:
                    self._keys[path] = _read_key(path)
                except UnusableKey as error:
                    self._keys[path] = error
            key = self._keys[path]
        if isinstance(key, UnusableKey):
            raise key
        return key


def _read_key(path: str) -> paramiko.PKey:
    try:
        found = os.stat(path)
        if found.st_uid == os.getuid() and found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise UnusableKey(f"{path} has mode {mode:04o}, which lets others use it: chmod 600 {path}")
        if stat.S_ISFIFO(found.st_mode):
            raise UnusableKey(f"{path} is a named pipe, which may be waited for without end")
        return paramiko.PKey.from_path(path)
    except FileNotFoundError:
        raise UnusableKey(f"there is no {path}") from None
    except (TypeError, paramiko.PasswordRequiredException):
        raise UnusableKey(f"{path} is encrypted: ssh-add {path}") from None
    except OSError as error:
        raise UnusableKey(f"{path}: {error.strerror or error}") from None
    except (ValueError, paramiko.SSHException, UnknownKeyType) as error:
        raise UnusableKey(f"{path} is no private key that can be used: {error}") from None


class _Transport(paramiko.Transport):
    """Remembers the algorithms that the host offers, for the error if it has none in common with us."""

    offered: dict[str, list[str]] = {}  # noqa: RUF012 - replaced, never changed

    def _really_parse_kex_init(self, m: Any, *given: Any, **more: Any) -> Any:
        # This method is private to paramiko. If a version does not call it, only the lists in one message
        # are missing.
        self.offered = super()._really_parse_kex_init(m, *given, **more)  # type: ignore[misc] # not in the stubs
        return self.offered


def new_transport(sock: Any) -> paramiko.Transport:
    """Make a transport that prefers ciphers with a built-in check of the bytes (GCM).

    Other ciphers need a MAC, which paramiko compares byte by byte: a sixth of the CPU time of a login.
    """
    transport = _Transport(sock)
    wanted = transport.get_security_options()
    # the sort is stable: it only moves GCM ciphers to the front
    wanted.ciphers = sorted(wanted.ciphers, key=lambda name: "-gcm@" not in name)
    return transport


def log_in(hop: Target, sock: socket.socket | paramiko.Channel, files: SshFiles) -> paramiko.Transport:
    """Return the connection after the login.

    Errors: Dropped if another attempt may help; LaunchError with what to do about it
    """
    began = time.monotonic()
    try:
        transport = new_transport(sock)
    except (paramiko.SSHException, OSError) as error:
        raise Dropped(f"{_where(hop)} ended the connection at once: {error}", exit_code=EXIT_HOST) from None
    transport.banner_timeout = transport.auth_timeout = hop.connect_timeout_s
    try:
        _keep_to(transport, hop.algorithms)
        # a list without this sign is a whole order, to which OpenSSH keeps
        if dict(hop.algorithms).get("key_types", "+")[0] in "+-":
            _prefer(transport, files.known_hosts.known(hop.host_key_name, hop.known_hosts).keys)
        transport.start_client(timeout=hop.connect_timeout_s)
        _check_host_key(hop, transport, sock, files)
        _authenticate(hop, transport, files)
    except IncompatiblePeer as error:
        transport.close()
        raise _nothing_in_common(hop, transport, error) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        transport.close()
        raise _why_not(hop, transport, error, waited_s=time.monotonic() - began) from None
    except BaseException:
        transport.close()
        raise
    return transport


def _why_not(hop: Target, transport: paramiko.Transport, error: Exception, *, waited_s: float) -> LaunchError:
    is_silent = waited_s >= hop.connect_timeout_s / 2
    why = (
        f"silent for {waited_s:.0f} s; is sshd there stopped, or out of memory?" if is_silent else str(error)
    )
    kind = LaunchError if is_silent else Dropped
    if transport.remote_version:
        return kind(f"{_where(hop)} ended the connection during the login: {why}", exit_code=EXIT_HOST)
    return kind(f"{_where(hop)} accepted the connection but does not speak SSH: {why}", exit_code=EXIT_HOST)


# The host's key.


def _keep_to(transport: paramiko.Transport, algorithms: tuple[tuple[str, str], ...]) -> None:
    """Use only algorithms that the configuration allows, in its order."""
    wanted = transport.get_security_options()
    for ours, names in algorithms:
        setattr(wanted, ours, kept(tuple(getattr(wanted, ours)), names))


def _prefer(transport: paramiko.Transport, known: tuple[HostKey, ...]) -> None:
    """Ask the host for a kind of key that known_hosts has for it, so that the two can be compared."""
    wanted = transport.get_security_options()
    kinds = [kind for key in known for kind in _algorithms(key) if kind in wanted.key_types]
    wanted.key_types = tuple(dict.fromkeys((*kinds, *wanted.key_types)))


def _algorithms(key: HostKey) -> tuple[str, ...]:
    return ("rsa-sha2-512", "rsa-sha2-256") if key.kind == "ssh-rsa" else (key.kind,)


def _check_host_key(hop: Target, transport: paramiko.Transport, sock: Any, files: SshFiles) -> None:
    """Check the host's key. Errors: LaunchError if it may not be trusted"""
    shown = transport.get_remote_server_key()
    key = HostKey(shown.get_name(), shown.asbytes())
    names = HostNames(hop.host_key_name, hop.portless_key_name, _address_name(hop, sock))
    adds = hop.unknown_host_keys == "add" and can_be_written(hop.portless_key_name or hop.host_key_name)
    by_name = [files.known_hosts.known(one, hop.known_hosts) for one in names[:2] if one]
    has_certificate = _may_have_certificate(transport)
    has_authority = has_certificate and any(one.authorities for one in by_name)
    finding = files.known_hosts.judge(key, names, hop.known_hosts, adds=adds and not has_authority)
    if finding.standing is Standing.REVOKED:
        place = next(one.place for one in finding.known.revoked if one.blob == key.blob)
        raise _host_error(
            f"its host key is REVOKED ({key.fingerprint}, by {place}): who has it may be an attacker; "
            "give the host a new key, and make that known"
        )
    if has_certificate and any(one.revoked for one in by_name):
        raise _only_openssh(hop, "the authority of its host key may be revoked")
    if finding.standing is Standing.KNOWN:
        return
    if has_authority:
        raise _only_openssh(hop, "the host key may be known to OpenSSH only")
    if finding.standing is Standing.CHANGED:
        raise _host_error(_changed(hop, key, finding))
    if not adds:
        raise _unknown(hop, key)
    if finding.unwritten:
        files.say_once(
            f"its host key was not known and is accepted, and cannot be written down: {finding.unwritten}",
            hop.address,
        )


def _address_name(hop: Target, sock: Any) -> str:
    """Return the host's address as known_hosts writes it, if ssh checks that too; else empty."""
    if not hop.checks_address or not isinstance(sock, socket.socket) or sock.family == socket.AF_UNIX:
        return ""
    address = str(sock.getpeername()[0])
    if address == hop.address or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return ""
    return f"[{address}]:{hop.port}" if hop.portless_key_name else address


def _may_have_certificate(transport: paramiko.Transport) -> bool:
    """Tell whether the host offers a certificate of its key, which only OpenSSH reads."""
    offered = getattr(transport, "offered", {}).get("server_key_algo_list")
    return offered is None or any("-cert-v" in name for name in offered)


def _only_openssh(hop: Target, because: str) -> LaunchError:
    problem = f"{_where(hop)} has a certificate of its host key, and known_hosts names an authority"
    return OpenSshMay(problem, because=because)


def _changed(hop: Target, key: HostKey, finding: KeyFinding) -> str:
    known = finding.known.keys
    same_kind = [one for one in known if one.kind == key.kind] or known
    return (
        f"its host key has CHANGED: known {same_kind[0].fingerprint} ({same_kind[0].place}), now "
        f"{key.fingerprint}; this may be an attack; if the host was reinstalled: "
        f"{how_to_remove(hop.host_key_name, same_kind[0].place.rpartition(':')[0])} and add the new key"
    )


def _unknown(hop: Target, key: HostKey) -> LaunchError:
    scan = where_to_add(f"ssh-keyscan {_port_option(hop)}{hop.address}", str(hop.known_hosts[0]))
    problem = f"its host key is not known ({key.kind} {key.fingerprint}); if that is the right key: {scan}"
    if hop.openssh.has_host_keys:
        return OpenSshMay(problem, because="the host key may be known to OpenSSH only")
    return _host_error(problem)


# The user's keys.


def _authenticate(hop: Target, transport: paramiko.Transport, files: SshFiles) -> None:
    """Try one key after the other.

    Errors: LaunchError if no key is accepted, or the host wants more than a key; SSHException if the
    connection ends
    """
    unusable: list[str] = []
    num_tried = 0
    with _agent_keys(hop, unusable) as agent_keys:
        for key in _candidates(hop, agent_keys, files, unusable):
            if _is_enough(hop, transport, key):
                return
            if isinstance(key, _AgentKey) and key.has_refused:
                unusable.append(f"ssh-agent refuses to sign with {key.comment or key.fingerprint}")
            else:
                num_tried += 1
    methods = _methods(hop, transport)
    if transport.is_authenticated():  # the host let us in without a key
        return
    if methods and "publickey" not in methods:
        raise _takes_no_key(hop, methods)
    problem = _why_no_key(hop, unusable, num_tried)
    if others := [one for one in methods if one in _OF_OPENSSH]:
        raise OpenSshMay(problem, because=f"no key was accepted, and {' or '.join(others)} would be")
    if hop.openssh.has_keys:
        because = "no key was accepted, and OpenSSH has others, on a token or with a certificate"
        raise OpenSshMay(problem, because=because)
    raise _host_error(problem)


def _is_enough(hop: Target, transport: paramiko.Transport, key: paramiko.PKey) -> bool:
    """Try this key; tell whether it completed the login. Errors: as _authenticate"""
    try:
        further = transport.auth_publickey(hop.user, key)
    except paramiko.BadAuthenticationType as error:
        raise _takes_no_key(hop, error.allowed_types) from None
    except paramiko.AuthenticationException as error:
        if not transport.is_active() or "timeout" in str(error).lower():
            raise paramiko.SSHException(str(error)) from None
        return False
    if further and "publickey" not in further:
        besides = " or ".join(further)
        raise OpenSshMay(
            f"{_login(hop)}: the key was accepted, and {besides} is asked for besides, which dslaunch never "
            f"answers; allow the key alone there (AuthenticationMethods in sshd_config), or {_SHARE}",
            because=f"{besides} is asked for besides a key",
        )
    return not further


def _why_no_key(hop: Target, unusable: list[str], num_tried: int) -> str:
    if not num_tried and unusable and all(" is encrypted: " in one for one in unusable):
        return f"{_login(hop)}: the private key is encrypted; load it with ssh-add first"
    tried = ", ".join(hop.identities) or "ssh-agent"
    named = [one for one in unusable if not one.startswith("there is no ")]
    if not num_tried:
        tried = f"no key: {'; '.join(named or unusable) or 'ssh-agent has none'}"
    elif named:
        tried += f"; not used: {'; '.join(named)}"
    return (
        f"{_login(hop)} was refused (tried {tried}); allow the key there, or give --ssh_identity, and test "
        f"with: ssh -o BatchMode=yes {_port_option(hop)}{_login(hop)} true"
    )


def _methods(hop: Target, transport: paramiko.Transport) -> list[str]:
    """Return the methods of login that the host accepts, asked by a login without a key; empty if it does
    not tell.
    """
    try:
        transport.auth_none(hop.user)
    except paramiko.BadAuthenticationType as error:
        return error.allowed_types
    except (paramiko.SSHException, EOFError, OSError):  # the host refuses further questions
        pass
    return []


def _takes_no_key(hop: Target, methods: list[str]) -> LaunchError:
    wanted = " or ".join(methods)
    return OpenSshMay(
        f"{_login(hop)}: it takes no key, only {wanted}, which dslaunch never answers; allow a key there "
        f"(PubkeyAuthentication in sshd_config), or {_SHARE}",
        because=f"no key is taken, only {wanted}",
    )


def _candidates(
    hop: Target, agent_keys: tuple[paramiko.PKey, ...], files: SshFiles, unusable: list[str]
) -> Iterator[paramiko.PKey]:
    """Yield the keys to try, each once: keys of the agent that are named, named files, then all other keys
    of the agent.

    The reason why a file is not tried is added to `unusable`.
    """
    seen: set[bytes] = set()

    def is_new(key: paramiko.PKey) -> bool:
        blob = key.asbytes()
        was_new = blob not in seen
        seen.add(blob)
        return was_new

    named = {blob for path in hop.identities for blob in _public_half(path)}
    yield from (key for key in agent_keys if key.asbytes() in named and is_new(key))
    for path in hop.identities:
        try:
            key = files.private_key(path)
        except UnusableKey as error:
            if not seen & set(_public_half(path)):
                unusable.append(str(error))
            continue
        if is_new(key):
            yield key
    if not hop.has_only_these_identities:
        yield from (key for key in agent_keys if is_new(key))


def _public_half(path: str) -> list[bytes]:
    """Return the public key in the file beside a private one; a key of the agent with this value is the same
    key.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        import base64

        return [base64.b64decode(read_named(Path(f"{path}.pub")).split()[1])]
    return []


@contextlib.contextmanager
def _agent_keys(hop: Target, unusable: list[str]) -> Iterator[tuple[paramiko.PKey, ...]]:
    """Yield the keys of the ssh-agent; none without an agent. If the agent does not answer, the reason is
    added to `unusable`.
    """
    path = os.environ.get("SSH_AUTH_SOCK", "") if hop.agent is None else hop.agent
    if not path:
        yield ()
        return
    agent, sock = AgentSSH(), socket.socket(socket.AF_UNIX)
    with sock:
        keys: tuple[_AgentKey, ...] = ()
        try:
            sock.settimeout(hop.connect_timeout_s)
            sock.connect(path)
            agent._connect(sock)  # type: ignore[attr-defined] # not in the stubs; paramiko's Agent asks $SSH_AUTH_SOCK only
            keys = tuple(_AgentKey(agent, one.blob, one.comment) for one in agent.get_keys())
        except TimeoutError:
            unusable.append(f"ssh-agent at {path} does not answer")
        except (OSError, paramiko.SSHException):
            keys = ()
        yield keys


# Words.


def _nothing_in_common(hop: Target, transport: paramiko.Transport, error: Exception) -> LaunchError:
    """Name the kind of algorithm, and both sides' lists."""
    ours = transport.get_security_options()
    offered = getattr(transport, "offered", {})
    for what, setting, mine, theirs in (
        ("key exchange", "KexAlgorithms", ours.kex, "kex_algo_list"),
        ("kind of host key", "HostKeyAlgorithms", ours.key_types, "server_key_algo_list"),
        ("cipher", "Ciphers", ours.ciphers, "server_encrypt_algo_list"),
        ("MAC", "MACs", ours.digests, "server_mac_algo_list"),
    ):
        if theirs in offered and not set(mine) & set(offered[theirs]):
            return OpenSshMay(
                f"{_where(hop)} and dslaunch have no {what} in common: it offers "
                f"{', '.join(offered[theirs])}; allow one of these in its sshd_config "
                f"({setting}): {', '.join(mine)}",
                because=f"no {what} is common with dslaunch's own SSH",
            )
    return OpenSshMay(
        f"{_where(hop)} and dslaunch have no algorithm in common: {error}; look at its sshd_config",
        because="no algorithm is common with dslaunch's own SSH",
    )


def _where(hop: Target) -> str:
    return f"{hop.address} port {hop.port}"


def _login(hop: Target) -> str:
    return f"{hop.user}@{hop.address}"


def _port_option(hop: Target) -> str:
    return "" if hop.port == 22 else f"-p {hop.port} "


def _host_error(message: str) -> LaunchError:
    return LaunchError(message, exit_code=EXIT_HOST)

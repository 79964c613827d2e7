"""The agent of another machine: one exec channel of one SSH connection."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paramiko

from ..bootstrap import remote_command
from ..dial import Dial, dial
from ..errors import EXIT_HOST, LaunchError
from ..ssh_config import Target
from .known_hosts import KnownHosts

READ_BYTES = 1 << 18
FIRST_PAUSE_S = (
    0.3  # before a connection that sshd dropped is tried again; each pause is twice as long, and random
)
WAKE_UP_S = 60.0  # the longest wait for bytes; nothing depends on it

logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # what it would print we report ourselves, once


# What paramiko raises, beside OSError, when a message cannot be sent.
_BROKEN = (paramiko.SSHException, EOFError)


class _Dropped(LaunchError):
    """sshd closed the connection before it said anything, as one does that has too many logins at the same time."""


class _HostKeyUnknown(Exception):
    def __init__(self, key: paramiko.PKey) -> None:
        super().__init__()
        self.key = key


class _Policy(paramiko.MissingHostKeyPolicy):
    """What to do with a host whose key is in no known_hosts file; a changed key never gets here."""

    def __init__(self, target: Target, known_hosts: KnownHosts) -> None:
        self._target = target
        self._known_hosts = known_hosts

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        if self._target.unknown_host_keys == "refuse":
            raise _HostKeyUnknown(key)
        if self._target.unknown_host_keys == "add":
            self._known_hosts.add(hostname, key, self._target.known_hosts[0])


class SshFiles:
    """What all connections of a job need from files, each read once. Any thread may use it."""

    def __init__(self) -> None:
        self.known_hosts = KnownHosts()
        self._keys: dict[tuple[str, type[paramiko.PKey]], paramiko.PKey | Exception] = {}
        self._lock = threading.Lock()

    def private_key(
        self, path: str, kind: type[paramiko.PKey], load: Callable[[], paramiko.PKey]
    ) -> paramiko.PKey:
        """What `load` gave the first time, or the error that it raised."""
        with self._lock:
            if (path, kind) not in self._keys:
                try:
                    self._keys[path, kind] = load()
                except (paramiko.SSHException, OSError) as error:
                    self._keys[path, kind] = error
            key = self._keys[path, kind]
        if isinstance(key, Exception):
            raise key
        return key


def _transport(sock: Any, **options: Any) -> paramiko.Transport:
    """As paramiko would make it, with a cipher first that checks what it decrypts by itself.

    The other ones need a MAC, which paramiko compares byte by byte: a sixth of the CPU time of a login.
    """
    transport = paramiko.Transport(sock, **options)
    wanted = transport.get_security_options()
    wanted.ciphers = sorted(wanted.ciphers, key=lambda name: "-gcm@" not in name)  # stable: else as it was
    return transport


class _Client(paramiko.SSHClient):
    """Takes private keys from SshFiles: to read and check one takes up to 0.1 s, and paramiko does it per connection."""

    def __init__(self, files: SshFiles) -> None:
        super().__init__()
        self._files = files

    def _key_from_filepath(
        self, filename: str, klass: type[paramiko.PKey], password: str | None
    ) -> paramiko.PKey:
        # Private to paramiko: a version that does not call it reads the file each time again, and works too.
        load = super()._key_from_filepath  # type: ignore[misc] # not in the stubs
        return self._files.private_key(filename, klass, lambda: load(filename, klass, password))


class SshConnection:
    """A login on another machine, made through all jumps. It ends with the last channel on it, or who holds it."""

    def __init__(self, target: Target, files: SshFiles, begun: Dial | None = None) -> None:
        """Log in, on the TCP connection that was `begun` if there is one.

        Errors: LaunchError with what to do about it.
        """
        self._files = files
        self._clients: list[paramiko.SSHClient] = []
        self._socket: socket.socket | None = None  # of the first connection, if it is one of ours
        self._lock = threading.Lock()
        self._num_holders = 0
        self._timeout_s = target.connect_timeout_s
        try:
            self.local_address = self._connect_again_and_again(target, begun)
        except BaseException:
            self._close()
            raise

    def run(self, command: str) -> paramiko.Channel:
        """Start a command; call `release` when it is not needed any more.

        Errors: LaunchError if that is refused; a connection without another channel is closed then.
        """
        self.hold()
        try:
            transport = self._clients[-1].get_transport()
            if transport is None:
                raise LaunchError("the connection ended right after it was made", exit_code=EXIT_HOST)
            channel = transport.open_session(timeout=self._timeout_s)
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError) as error:
            self.release()
            raise LaunchError(f"SSH refused to run a command: {error}", exit_code=EXIT_HOST) from None
        except BaseException:
            self.release()
            raise
        return channel

    def hold(self) -> None:
        with self._lock:
            self._num_holders += 1

    def release(self) -> None:
        with self._lock:
            self._num_holders -= 1
            is_last = self._num_holders == 0
        if is_last:
            self._close()

    def _close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        for client in reversed(self._clients):
            with contextlib.suppress(OSError, *_BROKEN):
                client.close()

    def _connect_again_and_again(self, target: Target, begun: Dial | None) -> str:
        """Until the time for a connection is used: a jump host drops some when a whole cluster comes at once."""
        give_up_at = time.monotonic() + target.connect_timeout_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._connect(target, begun)
            except _Dropped as dropped:
                self._close()
                self._clients.clear()
                begun = None
                import random  # here: it takes 1 ms, and most connections are made at once

                time.sleep(random.uniform(0.5, 1.0) * pause_s)
                pause_s *= 2
                left_s = round(give_up_at - time.monotonic(), 1)
                if left_s <= 0:
                    raise LaunchError(str(dropped), exit_code=EXIT_HOST) from None
                target = target._replace(connect_timeout_s=left_s)

    def _connect(self, target: Target, begun: Dial | None) -> str:
        """Through all jumps to the target; returns our own address on the way, if it is a direct one."""
        sock: socket.socket | paramiko.Channel | paramiko.ProxyCommand
        through: paramiko.SSHClient | None = None
        local_address = ""
        for hop in (*target.jumps, target):
            if through is not None:
                sock = _tunnel(through, hop)
            elif hop.proxy_command is not None:
                sock = paramiko.ProxyCommand(hop.proxy_command)
            else:
                sock = self._socket = dial(hop, begun)
                if hop is target:
                    local_address = str(sock.getsockname()[0])
            through = _log_in(hop, sock, self._files)
            self._clients.append(through)
        if self._socket is not None:
            # paramiko sets 0.1 s, to look whether it was closed: ten times a second for every host of a job.
            self._socket.settimeout(WAKE_UP_S)
        return local_address


class SshChannel:
    """A bootstrap started on another machine through SSH."""

    def __init__(self, connection: SshConnection, *, python: str = sys.executable) -> None:
        """`python` is tried first for the agent there; it goes through the login shell of that host."""
        self.local_address = connection.local_address
        self._connection = connection
        self._channel = connection.run(remote_command(python))
        self._is_closed = False
        self._lock = threading.Lock()

    def read(self) -> bytes:
        return self._channel.recv(READ_BYTES)

    def write(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except _BROKEN as error:  # of a ProxyCommand that was killed
            raise OSError(f"the connection is broken: {error}") from None

    def error_text(self) -> str:
        data = b""
        while self._channel.recv_stderr_ready():
            data += self._channel.recv_stderr(READ_BYTES)
        return data.decode("utf-8", "replace")

    def close(self) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self.hang_up()
            self._connection.release()

    @property
    def is_connected(self) -> bool:
        """Whether the connection still stands, whatever became of the stream."""
        transport = self._channel.get_transport()
        return transport is not None and transport.is_active()

    def hang_up(self) -> None:
        """End the stream only, which ends what was started; the connection stays until `close`."""
        with contextlib.suppress(OSError, *_BROKEN):
            self._channel.close()


def _tunnel(through: paramiko.SSHClient, hop: Target) -> paramiko.Channel:
    transport = through.get_transport()
    if transport is None:
        raise _host_error(f"the connection to the jump host before {hop.address} ended")
    try:
        return transport.open_channel(
            "direct-tcpip", (hop.address, hop.port), ("", 0), timeout=hop.connect_timeout_s
        )
    except paramiko.SSHException as error:
        raise _host_error(f"the jump host cannot reach {hop.address} port {hop.port}: {error}") from None


def _log_in(
    hop: Target, sock: socket.socket | paramiko.Channel | paramiko.ProxyCommand, files: SshFiles
) -> paramiko.SSHClient:
    client = _Client(files)
    for key in files.known_hosts.keys_of(hop.host_key_name, hop.known_hosts):
        client.get_host_keys().add(hop.host_key_name, key.get_name(), key)
    client.set_missing_host_key_policy(_Policy(hop, files.known_hosts))
    login = f"{hop.user}@{hop.address}"
    began = time.monotonic()
    try:
        client.connect(
            hop.host_key_name,
            username=hop.user,
            # The stubs know only one key file, paramiko takes a list.
            key_filename=[one for one in hop.identities if Path(one).exists()] or None,  # type: ignore[arg-type]
            look_for_keys=not hop.has_only_these_identities,
            allow_agent=not hop.has_only_these_identities,
            timeout=hop.connect_timeout_s,
            banner_timeout=hop.connect_timeout_s,
            auth_timeout=hop.connect_timeout_s,
            sock=sock,
            transport_factory=_transport,
        )
    except _HostKeyUnknown as unknown:
        raise _unknown_key(hop, unknown.key) from None
    except paramiko.BadHostKeyException as error:
        raise _changed_key(hop, error) from None
    except paramiko.PasswordRequiredException:
        raise _host_error(f"{login}: the private key is encrypted; load it with ssh-add first") from None
    except paramiko.AuthenticationException:
        tried = ", ".join(hop.identities) or "ssh-agent and the keys in ~/.ssh"
        raise _host_error(
            f"{login} was refused (tried {tried}); allow the key there, or give --ssh_identity, and test with: "
            f"ssh -o BatchMode=yes {_port_option(hop)}{login} true"
        ) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        client.close()
        waited_s = time.monotonic() - began
        is_dropped = waited_s < hop.connect_timeout_s / 2
        why = (
            str(error)
            if is_dropped
            else f"silent for {waited_s:.0f} s; is sshd there stopped, or out of memory?"
        )
        raise (_Dropped if is_dropped else LaunchError)(
            f"{hop.address} port {hop.port} accepted the connection but does not speak SSH: {why}",
            exit_code=EXIT_HOST,
        ) from None
    return client


def _unknown_key(hop: Target, key: paramiko.PKey) -> LaunchError:
    scan = f"ssh-keyscan {_port_option(hop)}{hop.address} >> {hop.known_hosts[0]}"
    return _host_error(
        f"its host key is not known ({key.get_name()} {key.fingerprint}); if that is the right key: {scan}"
    )


def _changed_key(hop: Target, error: paramiko.BadHostKeyException) -> LaunchError:
    return _host_error(
        f"its host key has CHANGED: known {error.expected_key.fingerprint}, now {error.key.fingerprint}; this may be "
        f"an attack; if the host was reinstalled: ssh-keygen -R '{hop.host_key_name}' and add the new key"
    )


def _port_option(hop: Target) -> str:
    return "" if hop.port == 22 else f"-p {hop.port} "


def _host_error(message: str) -> LaunchError:
    return LaunchError(message, exit_code=EXIT_HOST)

"""The agent of another machine: one exec channel of one SSH connection."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time

import paramiko

from ..errors import EXIT_HOST, LaunchError
from .bootstrap import remote_command
from .openssh_words import Dropped
from .ssh_config import Target
from .ssh_dial import Dial, dial
from .ssh_login import SshFiles, log_in
from .ssh_proxy import NOT_RUN, Proxy

READ_BYTES = 1 << 18
# Pause before a connection that sshd dropped is tried again; each further pause is twice as long, times a
# random factor.
FIRST_PAUSE_S = 0.3
WAKE_UP_S = 60.0  # the longest wait for bytes; nothing depends on it
ERROR_TEXT_BYTES = 1 << 16  # the end of a host's stderr
STATUS_WITHIN_S = 2.0  # after the end of a stream


# Errors of paramiko, beside OSError, when a message cannot be sent.
_BROKEN = (paramiko.SSHException, EOFError)


class SshConnection:
    """A login on another machine, made through all jumps.

    The connection ends when its last channel was closed and it is no longer held.
    """

    def __init__(self, target: Target, files: SshFiles, begun: Dial | None = None) -> None:
        """Log in, on the TCP connection that was `begun` if there is one.

        Errors: LaunchError with what to do about it.
        """
        self._files = files
        self._transports: list[paramiko.Transport] = []
        self._socket: socket.socket | None = None  # the first connection's
        self._proxy: Proxy | None = None
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

        Errors: LaunchError if the host refuses; the connection is then closed if it has no other channel.
        """
        self.hold()
        try:
            channel = self._transports[-1].open_session(timeout=self._timeout_s)
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError) as error:
            self.release()
            raise LaunchError(f"SSH refused to run a command: {error}", exit_code=EXIT_HOST) from None
        except BaseException:
            self.release()
            raise
        return channel

    def open(self, python: str, prefix: tuple[str, ...] = ()) -> SshChannel:
        """Start a bootstrap. Errors: as `run`"""
        return SshChannel(self, python=python, prefix=prefix)

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
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from the socket
        for transport in reversed(self._transports):
            with contextlib.suppress(OSError, *_BROKEN):
                transport.close()
        self._transports.clear()
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None

    def _connect_again_and_again(self, target: Target, begun: Dial | None) -> str:
        """Try to connect until the time for that is used: a jump host drops some connections when a whole
        cluster connects.
        """
        give_up_at = time.monotonic() + target.connect_timeout_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._connect(target, begun)
            except Dropped as dropped:
                problem = self._why_dropped(dropped)
                self._close()
                begun = None
                import random

                time.sleep(random.uniform(0.5, 1.0) * pause_s)
                pause_s *= 2
                left_s = round(give_up_at - time.monotonic(), 1)
                if left_s <= 0:
                    raise problem from None
                target = target._replace(connect_timeout_s=left_s)

    def _why_dropped(self, dropped: LaunchError) -> LaunchError:
        """Return the error to report. Errors: LaunchError if a ProxyCommand is the reason, so that another
        try cannot help
        """
        ended = self._proxy.why_ended() if self._proxy is not None and not self._transports else None
        if self._proxy is None or ended is None:
            return LaunchError(str(dropped), exit_code=EXIT_HOST)
        status, said = ended
        problem = LaunchError(
            f"ProxyCommand {self._proxy.command!r} ended with {status}: {said or 'no word'}; correct it in "
            "the ssh configuration, or repair the way that it goes",
            exit_code=EXIT_HOST,
        )
        if status in NOT_RUN:
            raise problem from None
        return problem

    def _connect(self, target: Target, begun: Dial | None) -> str:
        """Connect through all jumps to the target; return our address on the way, if it is a direct one."""
        sock: socket.socket | paramiko.Channel
        local_address = ""
        for hop in (*target.jumps, target):
            if self._transports:
                sock = _tunnel(self._transports[-1], hop)
            elif hop.proxy_command is not None:
                self._proxy = _run_proxy(hop.proxy_command)
                sock = self._socket = self._proxy.sock
            else:
                sock = self._socket = dial(hop, begun)
                if hop is target:
                    local_address = str(sock.getsockname()[0])
            self._transports.append(log_in(hop, sock, self._files))
        if self._socket is not None:
            # paramiko sets 0.1 s, to look whether it was closed: ten times a second for every host of a job.
            self._socket.settimeout(WAKE_UP_S)
        return local_address


class _Bell(threading.Event):
    """An event that both streams of a channel set.

    paramiko lets each stream clear the event when that stream is empty, even if the other one has bytes.
    """

    def clear(self) -> None:
        """Do nothing: only `silence` clears it."""

    def silence(self) -> None:
        super().clear()


class SshChannel:
    """A bootstrap started on another machine through SSH."""

    def __init__(
        self, connection: SshConnection, *, python: str = sys.executable, prefix: tuple[str, ...] = ()
    ) -> None:
        """The agent is started with `python` if the host has it, after the prefix; the host's login shell
        reads both.
        """
        self.local_address = connection.local_address
        self._connection = connection
        self._channel = connection.run(remote_command(python, prefix))
        # Both streams are read by one thread: unread stderr of a host would fill the window of both.
        self._bell = _Bell()
        self._channel.in_buffer.set_event(self._bell)
        self._channel.in_stderr_buffer.set_event(self._bell)
        self._errors = b""
        self._is_closed = False
        self._lock = threading.Lock()

    def read(self) -> bytes:
        while True:
            self._bell.silence()
            self._read_errors()
            if self._channel.recv_ready() or self._channel.eof_received or self._channel.closed:
                return self._channel.recv(READ_BYTES)
            self._bell.wait(WAKE_UP_S)

    def write(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except _BROKEN as error:  # the ProxyCommand of the connection was killed
            raise OSError(f"the connection is broken: {error}") from None

    def error_text(self) -> str:
        self._read_errors()
        return self._errors.decode("utf-8", "replace")

    def exit_status(self) -> int | None:
        self._channel.status_event.wait(STATUS_WITHIN_S)
        return self._channel.exit_status if self._channel.exit_status >= 0 else None

    def _read_errors(self) -> None:
        while self._channel.recv_stderr_ready():
            self._errors = (self._errors + self._channel.recv_stderr(READ_BYTES))[-ERROR_TEXT_BYTES:]

    def close(self) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self.hang_up()
            self._connection.release()

    @property
    def is_connected(self) -> bool:
        """Tell whether the connection still stands, even if the stream has ended."""
        transport = self._channel.get_transport()
        return transport is not None and transport.is_active()

    def hang_up(self) -> None:
        """End the stream only, which ends the bootstrap; the connection stays until `close`."""
        with contextlib.suppress(OSError, *_BROKEN):
            self._channel.close()


def _run_proxy(command: str) -> Proxy:
    try:
        return Proxy(command)
    except OSError as error:
        raise LaunchError(
            f"ProxyCommand {command!r} cannot be run: {error}; correct it, or the variable SHELL",
            exit_code=EXIT_HOST,
        ) from None


def _tunnel(through: paramiko.Transport, hop: Target) -> paramiko.Channel:
    try:
        return through.open_channel(
            "direct-tcpip", (hop.address, hop.port), ("", 0), timeout=hop.connect_timeout_s
        )
    except _BROKEN as error:
        raise LaunchError(
            f"the jump host cannot reach {hop.address} port {hop.port}: {error}", exit_code=EXIT_HOST
        ) from None

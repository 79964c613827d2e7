"""A channel whose connection is broken, as paramiko says it: with exceptions of its own."""

from __future__ import annotations

import socket
from typing import Any, cast

import paramiko
import pytest
from paramiko.buffered_pipe import BufferedPipe

from dslaunch.launcher.backends.ssh import SshChannel, SshConnection
from dslaunch.launcher.backends.ssh_login import new_transport


class Broken:
    """A connection and its channel, whose ProxyCommand was killed."""

    local_address = ""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.is_released = False
        self.in_buffer = self.in_stderr_buffer = BufferedPipe()

    def run(self, command: str) -> Any:
        return self

    def release(self) -> None:
        self.is_released = True

    def sendall(self, data: bytes) -> None:
        raise self._error

    def close(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        paramiko.ProxyCommandFailure("ssh -W", "Broken pipe"),
        paramiko.SSHException("gone"),
        EOFError(),
    ],
)
def test_what_cannot_be_sent_is_an_os_error_and_the_end_is_silent(error: Exception) -> None:
    """Who writes to many hosts, as the thread that pings them, must not end with the first broken one."""
    connection = Broken(error)
    channel = SshChannel(cast(SshConnection, connection))
    with pytest.raises(OSError, match="the connection is broken"):
        channel.write(b"ping")
    channel.close()
    assert connection.is_released


def test_a_cipher_that_needs_no_mac_is_asked_for_first_and_none_is_left_out() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = new_transport(ours).get_security_options().ciphers
    assert "-gcm@" in found[0]
    assert set(found) == set(paramiko.Transport._preferred_ciphers)

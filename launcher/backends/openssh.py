"""The agents of other machines, reached by the system's own `ssh`: one `ssh` process for each host.

It reads its configuration by itself, so every login of OpenSSH works: Kerberos, host-based logins, keys on
tokens, connections that are open already. It asks no questions, and never becomes the connection that others
share (ControlMaster): it would have to stay after the job's end for as long as others use it.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ..errors import EXIT_HOST, LaunchError
from ..inputs.host import Host
from ..job.plan import NodePlan
from ..options.hosts import SshOptions
from .bootstrap import ANNOUNCED, FROM_END, agent_python, announced_command
from .child_starter import child_starter
from .openssh_strict import STRICT, Facts, asked, strict_words
from .openssh_words import CONNECTION_FAILED, Dropped, is_of_ssh, why_not
from .ssh_config import CONNECT_TIMEOUT_S, given_identity

READ_BYTES = 1 << 18
ERROR_TEXT_BYTES = 1 << 14
MAX_NOISE_BYTES = 1 << 20  # bytes of login scripts; the reader of the stream reports more
START_MARGIN_S = 20.0  # from a connection to the first word of a Python: a login, and its shell
STATUS_WITHIN_S = 2.0  # after the end of the stream
END_WITHIN_S = 2.0  # after SIGTERM; then the ssh is killed
SAME_MOMENT_S = 0.5  # all logins of a lost host end within this time
LOOK_EVERY_S = 0.005  # pause between looks whether the ssh has ended
FIRST_PAUSE_S = 0.3  # before a login that sshd dropped is tried again; the same in ssh.py
NO_SSH = "there is no program ssh on PATH; install OpenSSH's client (apt-get install openssh-client)"


def settings(*, connect_timeout_s: float, heartbeat_s: float) -> dict[str, str]:
    """Return the options of each ssh of a job: they make it ask no questions, and share and forward nothing.

    If the network fails, the ssh ends a while after the agent.
    """
    return {
        **STRICT,
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, math.ceil(connect_timeout_s))),
        "ServerAliveInterval": str(max(1, math.ceil(heartbeat_s / 2))),
        "ServerAliveCountMax": "3",
        "ControlMaster": "no",
        "ClearAllForwardings": "yes",
    }


def ssh_program() -> str | None:
    """Return the path of the system's ssh, if there is one."""
    return shutil.which("ssh")


class _Told(NamedTuple):
    """ssh's own configuration for a host. `words` name the host, and win over that configuration."""

    facts: Facts
    words: tuple[str, ...]

    @property
    def connect_timeout_s(self) -> float:
        seconds = self.facts.get("connecttimeout", "none")
        return (float(seconds) if seconds.isdecimal() else 0.0) or CONNECT_TIMEOUT_S


class OpenSsh:
    """Connects the hosts of one job. Any thread may call `connect`."""

    def __init__(
        self, program: str, options: SshOptions, *, launcher_args: tuple[str, ...] = (), heartbeat_s: float
    ) -> None:
        """Errors: LaunchError if a given file is missing"""
        self._program = program
        self._options = options
        self._identity = given_identity(options)
        if options.config and not Path(options.config).is_file():
            raise LaunchError(f"--ssh_config={options.config}: there is no such file")
        self._heartbeat_s = heartbeat_s
        self._launcher_args = launcher_args
        self._told: dict[tuple[str, ...], _Told] = {}  # by the words that name a host

    def connect(
        self, node: NodePlan, connect_timeout_s: float | None, prefix: tuple[str, ...] = ()
    ) -> OpenSshChannel:
        """Start an agent on the node; if sshd drops the login, try again until the time for that is used.

        Without `connect_timeout_s` the host's ssh configuration gives the time, or a default of ours.
        Errors: LaunchError with what to do about it
        """
        if connect_timeout_s is None:
            connect_timeout_s = self._ask(self._where(node.host)).connect_timeout_s
        give_up_at = time.monotonic() + connect_timeout_s
        pause_s = FIRST_PAUSE_S
        while True:
            left_s = max(1.0, round(give_up_at - time.monotonic(), 1))
            try:
                return self._connect_once(node, left_s, prefix)
            except Dropped as dropped:
                time.sleep(random.uniform(0.5, 1.0) * pause_s)
                pause_s *= 2
                if time.monotonic() >= give_up_at:
                    raise LaunchError(str(dropped), exit_code=EXIT_HOST) from None

    def _connect_once(self, node: NodePlan, timeout_s: float, prefix: tuple[str, ...]) -> OpenSshChannel:
        given = settings(connect_timeout_s=timeout_s, heartbeat_s=self._heartbeat_s)
        given |= {"LogLevel": "ERROR", "RemoteCommand": "none", "PermitLocalCommand": "no"}
        words = [word for name, value in given.items() for word in ("-o", f"{name}={value}")]
        where = self._where(node.host)
        command = announced_command(agent_python(node.host), prefix)
        argv = (self._program, "-T", "-a", "-x", *words, *self._ask(where).words, command)
        channel = OpenSshChannel(argv)
        try:
            is_there = channel.wait_until_announced(timeout_s + START_MARGIN_S)
        except BaseException:
            channel.close()
            raise
        if is_there:
            return channel
        said = channel.own_words()
        channel.close()
        raise why_not(said, timeout_s=timeout_s, facts=self._ask(where).facts)

    def _where(self, host: Host) -> tuple[str, ...]:
        """Return the ssh options and the name that were given for the host; its ssh configuration is not in
        them.
        """
        options = self._options
        port, user = host.port or options.port, host.user or options.user
        words: list[str] = []
        for flag, value in (("-F", options.config), ("-p", port), ("-l", user), ("-i", self._identity)):
            if value is not None:
                words += [flag, str(value)]
        return (*words, *self._launcher_args, "--", host.name)

    def _ask(self, where: tuple[str, ...]) -> _Told:
        """Return ssh's configuration for the host that these words name, with options for strict checks of
        keys. Errors: LaunchError as strict_words
        """
        if where not in self._told:
            facts = asked(self._program, where)
            words = strict_words(facts, self._program, where, self._options.config)
            self._told[where] = _Told(facts, words)
        return self._told[where]


class OpenSshLogin:
    """A host on which several bootstraps are started, each by an ssh of its own."""

    def __init__(self, ssh: OpenSsh, node: NodePlan, connect_timeout_s: float | None) -> None:
        """Errors: LaunchError as OpenSsh.connect"""
        self._ssh = ssh
        self._node = node
        self._connect_timeout_s = connect_timeout_s
        self._prefix = node.host.exec_prefix or ()
        self._unused: list[OpenSshChannel] = [self._connect(self._prefix)]
        self._lock = threading.Lock()

    def open(self, python: str, prefix: tuple[str, ...] = ()) -> OpenSshChannel:
        """Errors: LaunchError as OpenSsh.connect"""
        with self._lock:
            if self._unused and prefix == self._prefix:
                return self._unused.pop()
        return self._connect(prefix)

    def _connect(self, prefix: tuple[str, ...]) -> OpenSshChannel:
        return self._ssh.connect(self._node, self._connect_timeout_s, prefix)

    def hold(self) -> None:
        """Do nothing: these streams share no connection."""

    def release(self) -> None:
        with self._lock:
            unused, self._unused = self._unused, []
        for one in unused:
            one.close()


class OpenSshChannel:
    """A bootstrap that an `ssh` of this machine started on another one."""

    def __init__(self, argv: tuple[str, ...]) -> None:
        """Start the ssh; do not wait for its connection.

        Errors: LaunchError if a limit of this machine does not allow it
        """
        self.local_address = ""
        # These variables keep an ssh on the way to the host from asking questions, too.
        environment = {
            **os.environ,
            "SSH_ASKPASS_REQUIRE": "never",
        }
        try:
            self._process = child_starter().start(argv, environment)
        except (OSError, subprocess.SubprocessError) as error:
            from ..node.system.limits import why_not_started

            why = why_not_started("ssh", error) or f"cannot start {argv[0]}: {error}"
            raise LaunchError(why, exit_code=EXIT_HOST) from None
        if self._process.stdin is None or self._process.stdout is None or self._process.stderr is None:
            raise AssertionError("Popen gave no pipes")
        self._in, self._out, self._err = self._process.stdin, self._process.stdout, self._process.stderr
        os.set_blocking(self._err.fileno(), False)
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._poll.register(self._err, select.POLLIN)
        self._kept = b""  # bytes read that no caller of read() has got yet
        self._errors = b""
        self._is_err_over = False
        self._is_closed = False
        self._is_hung_up = False
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._reaping = threading.Lock()

    def wait_until_announced(self, timeout_s: float) -> bool:
        """Wait until a Python there says that it runs; the output of login scripts before that is dropped.

        False if ssh could not connect. True also if the login worked but ended before that: the reader of
        the stream finds out why.

        Errors: LaunchError if nothing happens in this time
        """
        deadline = time.monotonic() + timeout_s
        noise = b""
        while len(noise) < MAX_NOISE_BYTES:
            data = self._read(deadline)
            if data is None:
                raise LaunchError(
                    f"nothing came within {timeout_s:g} s, neither an agent nor a refusal; does a login "
                    "script there wait for something? See: ssh -v -o BatchMode=yes HOST true",
                    exit_code=EXIT_HOST,
                )
            noise += data
            _, announced, rest = noise.partition(ANNOUNCED)
            came_from, end, kept = rest.partition(FROM_END)
            if announced and end:
                self.local_address = _ours(came_from.decode("ascii", "replace"))
                self._kept = kept
                return True
            if not data:
                break
        self._kept = noise
        return bool(noise) or self.exit_status() is not None

    def read(self) -> bytes:
        data, self._kept = self._kept, b""
        return data or self._read(None) or b""

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with self._writing:
            if self._in.closed:
                raise OSError("the stream is closed")
            while view:
                view = view[self._in.write(view) or 0 :]

    def error_text(self) -> str:
        """Return the host's error text without ssh's own lines, which tell only that the connection ended."""
        return "\n".join(line for line in self.own_words().splitlines() if not is_of_ssh(line))

    def own_words(self) -> str:
        """Return all of the error text, ssh's own lines included."""
        return self._errors.decode("utf-8", "replace").replace("\r", "")

    def exit_status(self) -> int | None:
        """Exit status of the bootstrap; ssh ends with a status of its own if that is not known."""
        if not self._has_ended(STATUS_WITHIN_S):
            return None
        status = self._process.returncode
        return status if 0 <= status != CONNECTION_FAILED else None

    def close(self) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        self._signal(signal.SIGTERM)
        if not self._has_ended(END_WITHIN_S):
            self._signal(signal.SIGKILL)
            self._has_ended(END_WITHIN_S)
        with self._writing, contextlib.suppress(OSError):
            self._in.close()
        with self._reading:  # wait until the reading thread has seen the end of the stream
            self._out.close()
            self._err.close()

    @property
    def is_connected(self) -> bool:
        """Tell whether `hang_up` ended the stream."""
        return self._is_hung_up

    def hang_up(self) -> None:
        """End the stream, unless it is just ending by itself, as when its host is lost."""
        if not self._has_ended(SAME_MOMENT_S):
            self._is_hung_up = True
            self._signal(signal.SIGTERM)

    def _read(self, deadline: float | None) -> bytes | None:
        """Return bytes, or empty at the end of the stream; None at the deadline."""
        with self._reading:
            while not self._out.closed:
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return None
                ready = {fd for fd, _ in self._poll.poll(None if left_s is None else left_s * 1e3)}
                if self._err.fileno() in ready:
                    self._read_errors()
                if self._out.fileno() in ready:
                    data = os.read(self._out.fileno(), READ_BYTES)
                    if not data:
                        self._has_ended(STATUS_WITHIN_S)
                        self._read_errors()
                    return data
            return b""

    def _read_errors(self) -> None:
        """Read the error text that has arrived; do not wait for more."""
        if self._is_err_over:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._err.fileno(), READ_BYTES):
                self._errors = (self._errors + data)[-ERROR_TEXT_BYTES:]
            self._is_err_over = True
            self._poll.unregister(self._err)

    def _signal(self, number: int) -> None:
        with self._reaping:
            if self._process.returncode is None:
                self._process.send_signal(number)

    def _has_ended(self, within_s: float) -> bool:
        """Tell whether the ssh has ended; if so, end processes that it started, as a ProxyCommand."""
        deadline = time.monotonic() + within_s
        with self._reaping:
            pid = self._process.pid
            while self._process.returncode is None:
                # Reap the ssh only after its process group was ended: the group has the same number, which
                # must not be reused before.
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
                    self._process.wait()
                elif time.monotonic() > deadline:
                    return False
                else:
                    time.sleep(LOOK_EVERY_S)
        return True


def _ours(connection: str) -> str:
    """Return our address from sshd's SSH_CONNECTION, if this machine has it: behind a jump host or a router
    with NAT sshd sees another machine's address.
    """
    address = connection.partition(" ")[0].removeprefix("::ffff:")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return address
    return ""

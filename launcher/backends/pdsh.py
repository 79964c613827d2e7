"""The agents of other machines, started by pdsh: they connect back to us over TCP, and that is their stream.

[Note: The token]
pdsh passes on no input, so the agents' streams are TCP connections to a port of this machine, at the address
from which their ssh came. A connection must begin with a token that is made for this job. It stands on pdsh's
command line and on the agents', so users of this machine and of the hosts can read it with `ps` while the job
starts; it is all they can read. It is taken once for each host, and only until every host has connected: a
program that is quicker than a host gets that host's part of the job, with its environment, and the host is
then reported as lost. Nor is the stream encrypted. Where users or the network may not be trusted so far, use
--launcher=ssh, which has no such port.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import psutil

from ..errors import EXIT_HOST, LaunchError
from ..inputs.hostfile import Host
from ..job.plan import NodePlan
from ..node.process_tree import die_with_parent
from ..options.hosts import SshOptions
from .bootstrap import READ_LOADER, node_python

READ_BYTES = 1 << 18
CONNECT_TIMEOUT_S = 10.0  # for ssh, unless --connect_timeout says otherwise
START_MARGIN_S = 20.0  # from a login to a connection: a login shell and a Python
HELLO_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0  # for pdsh to end once its agents have
NUM_LAST_LINES = 20

# Runs on the host, %n is its number: connect, say the token, and go on as an agent that was started over
# the stream. One line without backslashes, as it passes through a login shell. HOST is for a login
# without SSH_CONNECTION.
_CALL_BACK = (
    'import os,socket;s=socket.create_connection((os.environ.get("SSH_CONNECTION",'
    '"HOST").split()[0],PORT),30);'
    's.settimeout(None);s.sendall(("TOKEN %n"+chr(10)).encode());s.setsockopt(6,1,1);'
    "f=s.detach();os.dup2(f,0);os.dup2(f,1);os.close(f);" + READ_LOADER
)
_SSH_EXITED = re.compile(
    r"pdsh@[^:]*: (?P<host>\S+): (?:ssh|mcmd|exec)?\s*exited with exit code (?P<code>\d+)"
)


def pdsh_command(
    hosts: Sequence[Host],
    *,
    launcher_args: tuple[str, ...],
    here: str,
    port: int | str,
    token: str,
    python: str,
) -> tuple[str, ...]:
    """The command that starts an agent on each host; all at the same time,
    as each ssh stays as long as its agent.

    Errors: LaunchError for a host that pdsh cannot be told.
    """
    names = []
    for host in hosts:
        if ":" in host.name:
            raise LaunchError(
                f"{host.name}: pdsh takes no IPv6 address; write a name into the hostfile that means it"
            )
        names.append(host.name if host.user is None else f"{host.user}@{host.name}")
    code = _CALL_BACK.replace("HOST", here).replace("PORT", str(port)).replace("TOKEN", token)
    command = "exec " + " ".join(shlex.quote(word) for word in node_python(code, python))
    head = ("pdsh", "-S", "-R", "ssh", "-f", str(len(names)), "-w", ",".join(names))
    return (*head, *launcher_args, command)


def ssh_arguments(hosts: Sequence[Host], ssh: SshOptions, given: str) -> str:
    """What PDSH_SSH_ARGS_APPEND must be: the user's own, then what options and hostfile say.

    Errors: LaunchError for hosts with different ports: pdsh has one for all.
    """
    ports = {host.port if host.port is not None else ssh.port for host in hosts}
    if len(ports) > 1:
        raise LaunchError(
            "--launcher=pdsh has one SSH port for all hosts, but the hostfile gives different ones; write "
            "them into ~/.ssh/config, or use --launcher=ssh"
        )
    port = ports.pop() if ports else None
    options = [given] if given else []
    options.append("-oBatchMode=yes")
    for flag, value in (("-p", port), ("-l", ssh.user), ("-i", ssh.identity), ("-F", ssh.config)):
        if value is not None:
            if re.search(r"\s", str(value)):
                raise LaunchError(f"{value!r}: pdsh passes no white space on to ssh; use --launcher=ssh")
            options.append(f"{flag} {value}")
    if ssh.connect_timeout_s is not None:
        options.append(f"-oConnectTimeout={max(1, round(ssh.connect_timeout_s))}")
    return " ".join(options)


def describe_pdsh(
    hosts: Sequence[Host], *, launcher_args: tuple[str, ...], ssh: SshOptions
) -> tuple[str, ...]:
    """For people: the command, with words for what is only known when it runs.

    None if every host is this machine.

    Errors: LaunchError as pdsh_command and ssh_arguments.
    """
    if not hosts:
        return ()
    append = ssh_arguments(hosts, ssh, os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    command = pdsh_command(
        hosts,
        launcher_args=launcher_args,
        here=socket.gethostname(),
        port="<port>",
        token="<token>",
        python=sys.executable,
    )
    return (f"command: PDSH_SSH_ARGS_APPEND={shlex.quote(append)} {shlex.join(command)}",)


class Pdsh:
    """One run of pdsh for all hosts of a job.

    Make it in the main thread: pdsh ends when the thread that made it does.
    """

    def __init__(self, nodes: Sequence[NodePlan], *, launcher_args: tuple[str, ...], ssh: SshOptions) -> None:
        """Start it.

        Errors: LaunchError if there is no pdsh, or for a host that it cannot reach as asked.
        """
        if shutil.which("pdsh") is None:
            raise LaunchError(
                "--launcher=pdsh: pdsh is not installed; apt-get install pdsh, or use --launcher=ssh, which "
                "needs no other program",
                exit_code=EXIT_HOST,
            )
        self._nodes = list(nodes)
        self._token = secrets.token_hex(16)
        self._timeout_s = (ssh.connect_timeout_s or CONNECT_TIMEOUT_S) + START_MARGIN_S
        self._changed = threading.Condition()
        self._sockets: dict[int, socket.socket] = {}  # by place among the nodes, until taken
        self._seen: set[int] = set()
        self._last_lines: dict[str, list[str]] = {node.host.name: [] for node in nodes}
        self._ended: set[str] = set()  # hosts whose ssh has ended
        self._num_open = 0
        hosts = [node.host for node in nodes]
        append = ssh_arguments(hosts, ssh, os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
        self._server = _listen()
        command = pdsh_command(
            hosts,
            launcher_args=launcher_args,
            here=socket.gethostname(),
            port=self._server.getsockname()[1],
            token=self._token,
            python=sys.executable,
        )
        us = os.getpid()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PDSH_SSH_ARGS_APPEND": append},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(us, signal.SIGTERM),
        )
        atexit.register(self.close)
        self._errors = threading.Thread(target=self._read_errors, name="pdsh", daemon=True)
        self._errors.start()
        threading.Thread(target=self._accept, name="pdsh", daemon=True).start()

    def connect(self, node: NodePlan) -> PdshChannel:
        """Wait for the agent of this host.

        Errors: LaunchError with what ssh or the host said.
        """
        place = next(at for at, one in enumerate(self._nodes) if one.node_rank == node.node_rank)
        name = node.host.name
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while place not in self._sockets:
                if name in self._ended or self._process.poll() is not None:
                    said = "; ".join(self.error_text(name).split("\n")).strip() or "nothing"
                    raise LaunchError(
                        f"pdsh could not start an agent there; it said: {said}", exit_code=EXIT_HOST
                    )
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"no agent connected within {self._timeout_s:g} s; hosts must reach TCP port "
                        f"{self._server_port} of this machine, else use --launcher=ssh",
                        exit_code=EXIT_HOST,
                    )
                self._changed.wait(0.2)
            self._num_open += 1
            return PdshChannel(self, name, self._sockets.pop(place))

    @property
    def _server_port(self) -> int:
        try:
            return int(self._server.getsockname()[1])
        except OSError:
            return 0

    def error_text(self, name: str) -> str:
        with self._changed:
            return "\n".join(self._last_lines[name])

    def release(self) -> None:
        """A channel was closed; with the last one pdsh ends."""
        with self._changed:
            self._num_open -= 1
            is_last = self._num_open == 0 and len(self._seen | self._ended_places()) == len(self._nodes)
        if is_last:
            self.close()

    def close(self) -> None:
        """Leave nothing of it on this machine."""
        atexit.unregister(self.close)
        self._stop_listening()
        with self._changed:
            for connection in self._sockets.values():  # of hosts that were not waited for
                connection.close()
            self._sockets.clear()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._num_open == 0 and self._seen:
                self._process.wait(CLOSE_TIMEOUT_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            for process in (*top.children(recursive=True), top):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel has it, in a file system that hangs
            self._process.wait(CLOSE_TIMEOUT_S)
        self._errors.join(CLOSE_TIMEOUT_S)

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept(); close() alone would not
        self._server.close()

    def _ended_places(self) -> set[int]:
        return {at for at, node in enumerate(self._nodes) if node.host.name in self._ended}

    def _accept(self) -> None:
        """Until every host has connected, or the job is over."""
        with contextlib.suppress(OSError):
            while len(self._seen) < len(self._nodes):
                connection, _ = self._server.accept()
                threading.Thread(target=self._greet, args=(connection,), name="pdsh", daemon=True).start()
        self._stop_listening()

    def _greet(self, connection: socket.socket) -> None:
        """Take the connection if it says the token and the number of a host that has not connected yet."""
        place = None
        with contextlib.suppress(OSError, ValueError):
            connection.settimeout(HELLO_TIMEOUT_S)
            line = b""
            while not line.endswith(b"\n") and len(line) < 64:
                line += connection.recv(1) or b"\n"
            token, _, number = line.decode("ascii").strip().partition(" ")
            is_ours = hmac.compare_digest(token, self._token)
            # Old versions of pdsh leave %n as it is where there is one host only.
            place = int(number.replace("%n", "0")) if is_ours else None
        with self._changed:
            if place is None or place in self._seen or not 0 <= place < len(self._nodes):
                connection.close()
                return
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._seen.add(place)
            self._sockets[place] = connection
            self._changed.notify_all()
            if len(self._seen) == len(self._nodes):
                self._stop_listening()

    def _read_errors(self) -> None:
        if self._process.stderr is None:
            raise AssertionError("Popen gave no pipe")
        with self._process.stderr as lines:
            for line in lines:
                self._note(line)

    def _note(self, line: str) -> None:
        """`host: words` is what the host said; `pdsh@here: host: ssh exited with exit code
        255` is how it ended.
        """
        exited = _SSH_EXITED.match(line)
        name = exited["host"] if exited else line.partition(": ")[0]
        with self._changed:
            names = [one for one in self._last_lines if one == name or one.partition(".")[0] == name]
            for one in names or self._last_lines:
                if not exited:
                    words = line.removeprefix(f"{name}: ") if names else line
                    self._last_lines[one] = [*self._last_lines[one], words.rstrip("\n")][-NUM_LAST_LINES:]
                elif names:
                    self._last_lines[one] = self._last_lines[one] or [line.rstrip("\n")]
                    self._ended.add(one)
            self._changed.notify_all()


class PdshChannel:
    """The connection that one agent made to us."""

    def __init__(self, pdsh: Pdsh, host: str, connection: socket.socket) -> None:
        self.local_address = str(connection.getsockname()[0]).removeprefix("::ffff:")
        self._pdsh = pdsh
        self._host = host
        self._connection = connection
        self._is_closed = False

    def read(self) -> bytes:
        return self._connection.recv(READ_BYTES)

    def write(self, data: bytes) -> None:
        self._connection.sendall(data)

    def error_text(self) -> str:
        return self._pdsh.error_text(self._host)

    def exit_status(self) -> int | None:
        return None

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._pdsh.release()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)

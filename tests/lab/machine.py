"""One sound host: how it starts and ends, and how commands run in it."""

from __future__ import annotations

import os
import select
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import entry, network, procfs
from .cgroup import Cgroups
from .place import LabError, Place, address_of

START_TIMEOUT_S = 30.0  # a start takes 0.1 s; a machine busy with other work needs more
SSHD_PROGRAMS = ("sshd", "sshd-session", "sshd-auth")


class Process(NamedTuple):
    """A process of a host. `pid` is as the machine outside sees it: `os.kill(pid, ...)` works."""

    pid: int
    argv: str


class Machine:
    """One host: its namespaces, its folders, the commands in it."""

    def __init__(self, place: Place, name: str, index: int) -> None:
        self.name = name
        self.address = address_of(index)
        self._place = place
        self._index = index
        self._folder = place.host_folder(name)
        self._cgroups = Cgroups(place, name)
        # Until it was restored once: it may be a host that another process has made.
        self._may_be_cut = True
        self._may_have_rules = True
        self._is_slow = self._receives_slowly = False
        self._own_network = ""  # its addresses and routes when they were last known to be its own only
        self._listener: int | None = None  # the sshd that was found last
        self._popens: list[subprocess.Popen[Any]] = []
        self._popens_lock = threading.Lock()  # tests start commands from several threads

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.address}>"

    @property
    def home(self) -> Path:
        """Its /root, as seen from outside."""
        return self._folder / "home"

    @property
    def is_running(self) -> bool:
        return self._init() is not None

    def popen(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **popen_kwargs: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command in this host; the Popen is that command itself,
        so signals and exit status are its own.

        `env` is added to the environment of a login (entry.LOGIN_ENV); `cwd` is a folder of the host, /root
        if not given. Every signal starts out with its default action, whatever this process ignores.

        Errors: LabError if the host is down. A command that is not there ends with status 127.
        """
        init_pid = self._init_or_error()
        command = entry.in_cgroups(self._cgroups.procs_files(), entry.in_host(init_pid, cwd or "/root", argv))
        with entry.children_in_pid_namespace(init_pid):
            process = subprocess.Popen(command, env={**entry.LOGIN_ENV, **(env or {})}, **popen_kwargs)
        with self._popens_lock:
            self._popens = [*(other for other in self._popens if other.returncode is None), process]
        return process

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        timeout: float = 60,
        check: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this host to its end, with empty input; bytes that are not UTF-8
        become surrogates.

        Errors: subprocess.TimeoutExpired (the command is killed), CalledProcessError if `check`.
        """
        with self.popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()  # leaving the block waits for it, and not for children that hold its pipes
                raise
        done = subprocess.CompletedProcess([str(word) for word in argv], process.returncode, stdout, stderr)
        if check:
            done.check_returncode()
        return done

    def processes(self) -> list[Process]:
        """What belongs to jobs: everything in the host but its init, its sshd and what sshd runs for itself.

        Daemonised grandchildren are in it, zombies are not. A host that is down has none.
        """
        return self.processes_among(procfs.pids_by_namespace("pid"))

    def processes_among(self, pids_by_namespace: Mapping[str, tuple[int, ...]]) -> list[Process]:
        """As `processes`, from a look at /proc that several hosts share."""
        listed, init = [], self._init()
        for pid in pids_by_namespace.get(self._pid_namespace() or "", ()):
            if pid == init:
                continue
            argv = procfs.command_line(pid)
            if argv and procfs.program(pid) not in SSHD_PROGRAMS:
                listed.append(Process(pid, argv))
        return listed

    def commands(self) -> list[str]:
        """Every command line that `ps -ef` on this host shows now; takes about 1 ms."""
        pids = self._all_pids() if self.is_running else ()
        return [argv for argv in map(procfs.command_line, pids) if argv]

    def tx_bytes(self) -> int:
        """Bytes that eth0 has sent since the host booted."""
        return network.interface_bytes(self._init_or_error())[1]

    def rx_bytes(self) -> int:
        """Bytes that eth0 has received since the host booted."""
        return network.interface_bytes(self._init_or_error())[0]

    def reap(self) -> None:
        """Collect the commands of `popen` that have ended.

        The kernel keeps a dead host's init until the last of them is collected, and their parent is outside.
        """
        for process in self._popens:
            process.poll()

    def start(self) -> int:
        """Start init and sshd in the network that is there; the caller waits with
        `wait_for_start`, given the result.

        Result: a file descriptor from which the word of init will come.
        """
        read_fd, write_fd = os.pipe()
        command = [
            *(
                "setsid",
                "--fork",
                "env",
                "--default-signal",
                "nsenter",
                f"--net={self._place.netns_file(self.name)}",
            ),
            *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--"),
            *("bash", str(Path(__file__).with_name("init.sh"))),
            *(self.name, str(self._folder), str(self._place.root), str(write_fd)),
        ]
        self._cgroups.make()
        try:
            with (self._folder / "init.log").open("ab") as log:
                subprocess.run(
                    entry.in_cgroups(self._cgroups.procs_files(), command),
                    env=entry.LOGIN_ENV,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(write_fd,),
                    check=True,
                )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        return read_fd

    def wait_for_start(self, read_fd: int) -> None:
        """Wait until init has said that the host is up and its sshd listens; closes `read_fd`."""
        try:
            is_readable = select.select([read_fd], [], [], START_TIMEOUT_S)[0]
            word = os.read(read_fd, 100).decode() if is_readable else ""
        finally:
            os.close(read_fd)
        if not word:
            log = (self._folder / "init.log").read_text(errors="replace").strip()
            raise LabError(
                f"{self.name}: did not start within {START_TIMEOUT_S:.0f} s; its init said: {log!r}"
            )
        (self._folder / "init").write_text(word)
        self.wait_for_sshd()

    def wait_for_sshd(self) -> None:
        """Wait until its sshd listens."""
        if not procfs.wait_until(lambda: self.sshd_pid() is not None, timeout_s=START_TIMEOUT_S):
            log = (self._folder / "log" / "sshd.log").read_text(errors="replace").strip()
            raise LabError(f"{self.name}: sshd does not listen; its log says: {log!r}")

    def sshd_pid(self) -> int | None:
        """The sshd that listens; None if there is none. It writes its pid file once it does."""
        try:
            listener = int(self._sshd_pid_file().read_text())
        except (OSError, ValueError):
            return None
        found = self._listener
        namespace = self._pid_namespace()
        if found is None or (procfs.inner_pid(found), procfs.namespace_of(Path(f"/proc/{found}/ns/pid"))) != (
            listener,
            namespace,
        ):
            self._listener = next((pid for pid in self._pids() if procfs.inner_pid(pid) == listener), None)
        return self._listener

    def end(self) -> None:
        """Kill every process of this host at once; its network stays."""
        namespace = procfs.namespace_of(self._place.netns_file(self.name))
        if namespace is not None:
            # Killed first, thawed then: frozen processes get no chance to run another line.
            procfs.kill_until_gone(
                lambda: procfs.pids_in(namespace), namespace, after_kill=self._cgroups.thaw
            )
        (self._folder / "init").unlink(missing_ok=True)
        procfs.wait_until(self._have_popens_ended, timeout_s=procfs.DEATH_TIMEOUT_S)

    def kill_processes(self) -> None:
        """Kill every process but init and the sshd that listens."""
        namespace = self._pid_namespace()
        if namespace is not None:
            listener = self.sshd_pid()
            procfs.kill_until_gone(
                lambda: tuple(pid for pid in self._pids() if pid != listener and procfs.command_line(pid)),
                namespace,
                after_kill=self.reap,
            )

    def _have_popens_ended(self) -> bool:
        self.reap()
        return all(process.returncode is not None for process in self._popens)

    def _signal(self, pid: int, signum: int) -> None:
        procfs.send_signal(pid, self._pid_namespace() or "", signum)

    def _all_pids(self) -> tuple[int, ...]:
        return (self._init_or_error(), *self._pids())

    def _pids(self) -> tuple[int, ...]:
        """Everything in the pid namespace but init."""
        init, namespace = self._init(), self._pid_namespace()
        return tuple(pid for pid in procfs.pids_in(namespace) if pid != init) if namespace else ()

    def _pid_namespace(self) -> str | None:
        init = self._init()
        return procfs.namespace_of(Path(f"/proc/{init}/ns/pid")) if init is not None else None

    def _init(self) -> int | None:
        """The pid of its init, None if the host is down."""
        try:
            pid, start_time = (self._folder / "init").read_text().split()
        except (OSError, ValueError):
            return None
        is_alive = procfs.start_time(int(pid)) == start_time and procfs.state(int(pid)) not in "ZX"
        return int(pid) if is_alive else None

    def _init_or_error(self) -> int:
        init = self._init()
        if init is None:
            raise LabError(f"{self.name}: is down; only a host that is up can do this; boot() it first")
        return init

    def _sshd_pid_file(self) -> Path:
        return Path(f"/proc/{self._init_or_error()}/root/run/sshd.pid")

"""The lab as a whole: made, found again, put back in order, taken down."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from . import entry, folders, network, procfs, ssh
from .cgroup import Cgroups
from .host import Host
from .lock import Lock
from .machine import Process
from .place import BASE, MAX_HOSTS, LabError, Place, address_of, host_names

CHECKOUT = Path(__file__).resolve().parents[2]
SLOTS = 2  # per node, in the hostfile
PROGRAMS = (
    "bash",
    "env",
    "ip",
    "iptables",
    "mount",
    "nsenter",
    "setsid",
    "ssh",
    "ssh-keygen",
    "sshd",
    "unshare",
)
# Asks the kernel for each thing a host is made of; the namespaces end with the command.
PROBE = (
    "mount -t tmpfs none /mnt && ip link add name probe0 type veth peer name probe1 && ip link add name "
    "probe2 type bridge"
)


class Lab:
    """`num_hosts` nodes and a head on one network of their own.

    As a context manager it is taken down at the end; one that was found by `attach` stays up.
    """

    def __init__(self, place: Place, num_hosts: int, lock: Lock | None) -> None:
        self._place = place
        self._lock = lock  # None: made by another process
        self.hosts = tuple(Host(place, name, index) for index, name in enumerate(host_names(num_hosts)))
        self.head = self.hosts[0]
        self.nodes = self.hosts[1:]

    @staticmethod
    def can_be_made() -> str | None:
        """Why no lab can be made on this machine, None if one can; takes about 20 ms."""
        if not sys.platform.startswith("linux"):
            return f"this is {sys.platform}; the lab needs Linux"
        if os.geteuid() != 0:
            return f"user {os.geteuid()} may not make hosts; the lab needs root"
        missing = [name for name in PROGRAMS if shutil.which(name, path=entry.LOGIN_ENV["PATH"]) is None]
        if missing:
            packages = "openssh-server openssh-client iproute2 iptables util-linux"
            return f"programs are missing: {', '.join(missing)}; install {packages}"
        namespaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--fork")
        probe = subprocess.run(
            ["unshare", *namespaces, "sh", "-c", PROBE],
            capture_output=True,
            text=True,
            env=entry.LOGIN_ENV,
            check=False,
        )
        if probe.returncode:
            return f"this kernel or container refuses what a host is made of: {probe.stderr.strip()}"
        return None

    @classmethod
    def up(
        cls,
        num_hosts: int,
        *,
        shared: Sequence[Path] = (),
        name: str = "lab",
        wait_s: float = 60,
        replace: bool = False,
        report: Callable[[str], None] = lambda line: None,
    ) -> Lab:
        """Make a lab; what earlier ones, of whatever name, left when they crashed is cleaned away first.

        The checkout, the virtual environment and the interpreter are visible in every host, read-only; the
        folders in `shared` and `lab.shared` are visible and writable, all at their own paths. Labs with
        different names may be up at the same time, each on a network of its own. `replace`: also take down
        one that was left up on purpose (`detach`).

        Errors: LabError if the machine cannot, if another process keeps its lab for `wait_s`,
                or a host does not start.
        """
        reason = cls.can_be_made()
        if reason is not None:
            raise LabError(f"no lab here: {reason}")
        if not 1 <= num_hosts < MAX_HOSTS:
            raise LabError(f"{num_hosts} hosts; allowed are 1 to {MAX_HOSTS - 1}; ask for fewer")
        paths = _visible_paths(shared)
        place = Place(name=name)
        lock = Lock(place.lock)
        lock.acquire(timeout_s=wait_s)
        try:
            if _read_state(place).get("is_detached") and not replace:
                raise LabError(
                    f"{place.root}: a lab was left up here by hand, one can be up at a time; "
                    "take it down with `python -m tests.lab down`, or use it with Lab.attach()"
                )
            _tear_down(place)
            _tear_down_left_behind()
            lab = cls(place, num_hosts, lock)
            try:
                lab._make(paths, report)
            except BaseException:
                _tear_down(place)
                raise
        except BaseException:
            lock.release()
            raise
        return lab

    @classmethod
    def attach(cls, name: str = "lab") -> Lab:
        """The lab that is up, made by this or another process.

        Errors: LabError if there is none.
        """
        place = Place(name=name)
        num_hosts = _read_state(place).get("num_hosts")
        if num_hosts is None:
            raise LabError(f"{place.root}: no lab is up; make one with `python -m tests.lab up 4`")
        return cls(place, num_hosts, lock=None)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self.down()

    def __repr__(self) -> str:
        return f"<Lab {self._place.name!r}: {', '.join(host.name for host in self.hosts)}>"

    @property
    def shared(self) -> Path:
        """A folder that all hosts see at this same path and may write to, like NFS; gone after `down`."""
        return self._place.shared

    @property
    def hostfile(self) -> Path:
        """A hostfile with all nodes, in `shared`."""
        return self.shared / "hostfile"

    @property
    def is_detached(self) -> bool:
        return bool(_read_state(self._place).get("is_detached"))

    def host(self, name: str) -> Host:
        """The host of that name.

        Errors: LabError with the names there are.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise LabError(f"{name!r}: hosts are {', '.join(host.name for host in self.hosts)}; name one of them")

    def down(self) -> None:
        """Kill everything in the hosts and remove all that the lab made.

        Errors: LabError if another process has the lab in use.
        """
        lock = self._lock
        if lock is None:
            lock = Lock(self._place.lock)
            lock.acquire(timeout_s=0)
        try:
            _tear_down(self._place)
            for host in self.hosts:
                host.reap()
        finally:
            lock.release()
            self._lock = None

    def detach(self) -> None:
        """Leave the lab up when this process ends; `attach` finds it."""
        _write_state(self._place, num_hosts=len(self.nodes), is_detached=True)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def processes(self) -> list[tuple[str, Process]]:
        """What belongs to jobs, on all hosts, each with the name of its host."""
        pids = procfs.pids_by_namespace("pid")
        return [(host.name, process) for host in self.hosts for process in host.processes_among(pids)]

    def wait_until_clean(self, timeout_s: float = 10) -> list[tuple[str, Process]]:
        """Wait until no host has a process of a job; the result is what is left then: [] if all is well."""
        if procfs.wait_until(lambda: not self._reap_and_list(), timeout_s=timeout_s):
            return []
        return self._reap_and_list()

    def restore(self) -> None:
        """Put every host back as `up` made it: no fault, no process of a job,
        no added file in its own folders.
        """
        for host in self.hosts:
            host.restore()

    def _reap_and_list(self) -> list[tuple[str, Process]]:
        for host in self.hosts:
            host.reap()
        return self.processes()

    def _make(self, paths: dict[Path, str], report: Callable[[str], None]) -> None:
        place, names = self._place, tuple(host.name for host in self.hosts)
        for folder in (place.root / "stage", place.shared):
            folder.mkdir(parents=True)
        _write_state(place, num_hosts=len(self.nodes), is_detached=False)
        paths = {**paths, place.shared: "rw"}
        place.paths.write_text("".join(f"{mode} {path}\n" for path, mode in sorted(paths.items())))
        # The second line of each host names its address as IPv6 sockets show it:
        # programs look that up, and warn.
        addresses = "".join(
            f"{address_of(index)} {name}\n::ffff:{address_of(index)} {name}.mapped\n"
            for index, name in enumerate(names)
        )
        (place.root / "etc_hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{addresses}")
        (place.root / "etc_shadow").write_text("root:*:19000:0:99999:7:::\n")  # no password, and not locked
        self.hostfile.write_text("".join(f"{node.name} slots={SLOTS}\n" for node in self.nodes))

        report(f"keys and folders of {len(names)} hosts")
        ssh.make_user_key(place)
        for name in names:
            folders.make(place, name)
        ssh.note_known_hosts(place, names)
        for host in self.hosts:
            ssh.write_home_ssh(place, host.home)
        report("network: one bridge, a cable to each host")
        network.add_switch(place)
        network.add_hosts(place, {name: index for index, name in enumerate(names)})
        report("starting init and sshd of each host")
        starts = [(host, host.start()) for host in self.hosts]
        for host, read_fd in starts:
            host.wait_for_start(read_fd)
        report(f"{len(names)} hosts are up")


def _tear_down(place: Place) -> None:
    """Remove whatever there is of a lab: works after a crash at any point, and twice."""
    hosts_folder = place.root / "hosts"
    hosts = sorted(folder.name for folder in hosts_folder.iterdir()) if hosts_folder.exists() else []
    cgroups = [Cgroups(place, host) for host in hosts]

    def thaw() -> None:
        for each in cgroups:
            each.thaw()

    for name in place.netns_left():
        namespace = procfs.namespace_of(place.netns_file("").with_name(name))
        if namespace is not None:
            procfs.kill_until_gone(partial(procfs.pids_in, namespace), namespace, after_kill=thaw)
    network.remove_all(place)
    for each in cgroups:
        each.remove()
    if place.root.exists():
        shutil.rmtree(place.root)


def _tear_down_left_behind() -> None:
    """Take down the labs whose process has ended without that: each of a `pytest -n` has its own name."""
    for path in BASE.glob("*.lock"):
        place = Place(name=path.stem)
        lock = Lock(place.lock)
        if place.root.exists() and not _read_state(place).get("is_detached"):
            with contextlib.suppress(LabError):  # its process lives, or this is the lab that is being made
                lock.acquire(timeout_s=0)
                try:
                    _tear_down(place)
                finally:
                    lock.release()


def _visible_paths(shared: Sequence[Path]) -> dict[Path, str]:
    """Path -> `ro` or `rw`, for every folder that hosts see at its own path."""
    paths: dict[Path, str] = {}
    for path, mode in (
        *((path, "ro") for path in (CHECKOUT, Path(sys.prefix), Path(sys.base_prefix))),
        *((path, "rw") for path in shared),
    ):
        if not path.is_absolute() or not path.is_dir():
            raise LabError(
                f"{path}: must be the absolute path of a folder, to be seen in all hosts; make it first"
            )
        paths[path] = paths[path.resolve()] = mode
    return paths


def _read_state(place: Place) -> dict[str, int]:
    try:
        state: dict[str, int] = json.loads(place.state.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return state


def _write_state(place: Place, *, num_hosts: int, is_detached: bool) -> None:
    place.state.write_text(json.dumps({"num_hosts": num_hosts, "is_detached": is_detached}))

"""Containers on this machine: namespaces that `unshare` makes for a job, and one that podman keeps running.

Podman gets its image from nowhere: /usr of this machine is bound into a folder that is the rest of a system.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.launcher.local_job import MARK, poll

UNSHARE = "unshare -m -p -f -u --mount-proc"
BWRAP = "bwrap --dev-bind / / --unshare-pid --proc /proc"


def why_no_unshare() -> str:
    """Why this process may not make namespaces; empty if it may."""
    return _why_not(UNSHARE)


def why_no_bwrap() -> str:
    """The same of bubblewrap, whose first process stays outside."""
    return _why_not(BWRAP)


@functools.cache
def _why_not(prefix: str) -> str:
    words = prefix.split()
    try:
        done = subprocess.run(
            [*words, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return f"{words[0]} is not installed"
    return "" if done.returncode == 0 else done.stderr.strip()


class PodmanMissing(Exception):
    """No container can be run with podman here."""


class Podman:
    """Podman with all it keeps in `folder`, its own mounts, and one running container `box`."""

    def __init__(self, folder: Path, *options: str) -> None:
        """`options` are for the container. Errors: PodmanMissing"""
        if shutil.which("podman") is None:
            raise PodmanMissing("podman is not installed")
        if not Path("/usr/bin/python3").exists():
            raise PodmanMissing("there is no /usr/bin/python3 for the container")
        if os.geteuid() != 0:
            raise PodmanMissing("it needs root")
        self.name = f"dslaunch-test-{uuid.uuid4().hex[:12]}"
        self._folder = folder
        self._root = folder / "root"
        for name in ("usr", "proc", "sys", "dev", "tmp", "run", "etc", "root", "var/tmp"):
            (self._root / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64", "sbin"):
            if Path("/", name).is_symlink():
                (self._root / name).symlink_to(f"usr/{name}")
        for name in ("passwd", "group", "ld.so.cache"):
            shutil.copy(f"/etc/{name}", self._root / "etc" / name)
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        (folder / "containers.conf").write_text(
            f'[containers]\ndefault_ulimits = ["nofile={files}:{files}","nproc=4096:4096"]\n'
        )
        # crun runs nothing where both versions of cgroups are mounted, so here the second one is not.
        self._mounts = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", "umount /sys/fs/cgroup/unified; echo; exec sleep 3600"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._mounts.stdout is None or not self._mounts.stdout.readline():
            raise PodmanMissing("no mounts of its own can be made")
        self.program = folder / "podman"
        self._run = Path(tempfile.mkdtemp(prefix="podman-"))  # its path must be short
        store = f"--root {folder}/store --runroot {self._run}/run --tmpdir {self._run}/tmp"
        self.program.write_text(
            f'#!/bin/sh\nexec nsenter --mount=/proc/{self._mounts.pid}/ns/mnt --wdns="$PWD" env '
            f'CONTAINERS_CONF={folder}/containers.conf podman --cgroup-manager cgroupfs {store} "$@"\n'
        )
        self.program.chmod(0o755)
        try:
            self.run("run", "-d", "--name", self.name, *self.options(*options), "sleep", "3600")
        except PodmanMissing:
            self.close()
            raise

    def options(self, *more: str) -> list[str]:
        """What `podman run` needs, up to the command."""
        words = ["-v", "/usr:/usr:ro", "--network", "host", "--security-opt", "seccomp=unconfined", *more]
        return [*words, "--rootfs", str(self._root)]

    @property
    def prefix(self) -> str:
        """Leads into the container; the mark of a job comes along, so that its survivors are found."""
        return f"{self.program} exec -i -e {MARK} {self.name}"

    def run(self, *words: str) -> str:
        """Errors: PodmanMissing if it says no"""
        done = subprocess.run(
            [str(self.program), *words],
            cwd=self._folder,  # conmon leaves a file there when a container meets its limit of memory
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise PodmanMissing(done.stderr.strip().rpartition("\n")[2])
        return done.stdout

    def close(self) -> None:
        with contextlib.suppress(PodmanMissing):
            self.run("rm", "-f", "-t", "0", self.name)
        self._mounts.kill()
        self._mounts.communicate()
        mark = str(self._run).encode()

        def is_running() -> bool:  # podman cleans up behind a container in processes of their own
            return any(mark in _command_line(name) for name in filter(str.isdigit, os.listdir("/proc")))

        poll(lambda: not is_running(), f"the end of podman in {self._run}")
        shutil.rmtree(self._run)


def _command_line(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def podman(folder: Path, *options: str) -> Iterator[Podman]:
    """One for as long as the block lasts. Errors: PodmanMissing"""
    folder.mkdir()
    one = Podman(folder, *options)
    try:
        yield one
    finally:
        one.close()

"""The way into a host: how a command becomes a process of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from .place import LabError

LOGIN_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
}
# $1: files of cgroups, separated by ':'. The shell writes itself ('0') into each, then becomes the rest.
JOIN_CGROUPS = 'IFS=:; for file in $1; do echo 0 >"$file" || exit 125; done; shift; exec "$@"'


def in_cgroups(procs_files: Sequence[Path], argv: Sequence[str]) -> list[str]:
    """The command that joins these cgroups and then becomes `argv`."""
    return ["/bin/sh", "-c", JOIN_CGROUPS, "sh", ":".join(map(str, procs_files)), *argv]


def in_host(init_pid: int, cwd: str | Path, argv: Sequence[str | Path]) -> list[str]:
    """The command that enters the namespaces of `init_pid`, all but that of pids, and then becomes `argv`.

    No value of the environment is in it: command lines can be read by everybody on the host.
    """
    enter = [path_of("nsenter"), f"--target={init_pid}", "--mount", "--uts", "--ipc", "--net", "--"]
    login = [path_of("env"), "--default-signal", "-C", str(cwd), f"PWD={cwd}"]
    return [*enter, *login, *map(str, argv)]


@contextlib.contextmanager
def children_in_pid_namespace(init_pid: int) -> Iterator[None]:
    """Children that this thread starts meanwhile are born in the pid namespace of `init_pid`.

    That is why `Popen.pid` can be the command itself. `nsenter --pid` would stay in between: it must fork,
    does not pass on signals, and leaves the command behind when it is killed.
    """
    own_fd = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        host_fd = os.open(f"/proc/{init_pid}/ns/pid", os.O_RDONLY)
        try:
            _set_namespace(host_fd)
            try:
                yield
            finally:
                _set_namespace(own_fd)
        finally:
            os.close(host_fd)
    finally:
        os.close(own_fd)


def path_of(program: str) -> str:
    """Its full path: the command's own PATH, which a test may have set to anything, is not asked.

    Errors: LabError if it is not installed.
    """
    path = shutil.which(program, path=LOGIN_ENV["PATH"])
    if path is None:
        raise LabError(f"{program}: not in {LOGIN_ENV['PATH']}; the lab needs it; install it")
    return path


def _set_namespace(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
        errno = ctypes.get_errno()
        raise OSError(errno, f"setns: {os.strerror(errno)}")

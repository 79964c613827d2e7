"""A failed login of mpirun to one of its hosts, while mpirun waits for that host without end.

Hydra (MPICH and its kin) starts an ssh for each host, and each host then connects to it. It does not look at
how an ssh ends: mpirun and the ranks of the other hosts wait for a host that has no such name, is down or
refuses the login.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

LOGIN = "ssh"
# Exit status of an ssh that could not connect; otherwise ssh has the status of its command
LOGIN_FAILED = 255
PATIENCE_S = 5.0  # time for mpirun to end by itself, as that of Open MPI does


class LostLogin:
    """Watches a command that starts processes on `num_hosts` hosts.

    Only Hydra's need it: other commands end by themselves.
    """

    def __init__(self, pid: int, num_hosts: int) -> None:
        self._pid = pid
        self._num_hosts = num_hosts
        self._since: float | None = None

    def look(self) -> str:
        """Return why the command waits in vain; empty if it does not, as far as can be seen.

        Call it again and again.
        """
        try:
            is_lost = self._has_failed_login() and self._num_connected() < self._num_hosts
        except (OSError, psutil.Error):  # the process has just ended
            is_lost = False
        now = time.monotonic()
        self._since = (self._since or now) if is_lost else None
        if self._since is None or now - self._since < PATIENCE_S:
            return ""
        return (
            f"an ssh to one of the hosts ended with exit code {LOGIN_FAILED}, and its words are above: "
            "mpirun would wait for that host without end, so it is stopped; test with ssh HOST true"
        )

    def _has_failed_login(self) -> bool:
        """Tell whether a login has failed. The kernel keeps the exit status of its ssh, because the command
        never reads it.
        """
        return any(
            child.name() == LOGIN
            and child.status() == psutil.STATUS_ZOMBIE
            and _exit_code(child.pid) == LOGIN_FAILED
            for child in psutil.Process(self._pid).children()
        )

    def _num_connected(self) -> int:
        """Number of connections to the ports that the command listens on."""
        process = psutil.Process(self._pid)
        # The method was called `connections` before psutil 6.
        connections = getattr(process, "net_connections", None) or process.connections
        found = connections("tcp")
        ports = {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
        return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port in ports for one in found)


def _exit_code(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        status = int(Path(f"/proc/{pid}/stat").read_text().rpartition(" ")[2])
        return status >> 8 & 0xFF
    return None

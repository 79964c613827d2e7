"""Open files that a job's connections need. The limit is checked before the first connection: without a free
descriptor no error can be reported properly.
"""

from __future__ import annotations

import resource

from ..errors import LaunchError

NUM_OWN = 48  # files of this process: Python, its modules while they are loaded, streams, files that are read
WITH_TREE = ", or reach most hosts through others with --tree_above"
NUM_PER_HOST = 2  # a connection, and a second file while it is made
NUM_PER_PROCESS = 3  # the pipes of an ssh; its start needs two more, but only one ssh is started at a time


def ensure_open_files(num_hosts: int, *, num_per_host: int = NUM_PER_HOST, hint: str = WITH_TREE) -> None:
    """Raise this process's limit if that is needed. `num_hosts` counts the hosts connected from here; the
    agent counts the files of this machine's workers, see node/system/limits.py. `hint`: another remedy.

    Errors: LaunchError if that is not allowed
    """
    needed = NUM_OWN + num_per_host * num_hosts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise_it = f"raise its limit (ulimit -n {needed})"
        if not num_hosts:
            raise LaunchError(
                f"dslaunch itself takes about {needed} open files, and this process may have {hard}; "
                f"{raise_it}"
            )
        hosts = "1 host takes" if num_hosts == 1 else f"{num_hosts} hosts take"
        raise LaunchError(
            f"{hosts} about {needed} open files, and this process may have {hard}; {raise_it}{hint}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

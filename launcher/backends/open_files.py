"""How many files a job's connections take, asked before any is made:
without one left nothing can be said properly.
"""

from __future__ import annotations

import resource

from ..errors import LaunchError
from ..wording import count

NUM_OWN = 48  # of this process: Python, its modules while they are loaded, streams, files that are read
NUM_PER_HOST = 2  # a connection, and while it is made another one


def ensure_open_files(num_hosts: int) -> None:
    """Raise this process's limit if that is needed.

    Errors: LaunchError if that is not allowed
    """
    needed = NUM_OWN + NUM_PER_HOST * num_hosts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{count(num_hosts, 'host')} take about {needed} open files, and this process may have {hard}; "
            f"raise its limit (ulimit -n {needed}), or reach most hosts through others with --tree_above"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

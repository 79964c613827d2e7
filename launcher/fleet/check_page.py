"""One page for the administrator: unusable hosts, reasons, the commands that show them, oddities."""

from __future__ import annotations

import getpass
import os
import time

from ..inputs.host_list import folded
from .check_facts import ClusterFacts
from .check_summary import CheckSummary

_LOOKS = {  # a question of the check: the command that shows the same on the host
    "python": "{python} --version",
    "torch": "{python} -c 'import torch'",
    "cwd": "ls -ld {cwd}",
    "gpu": "nvidia-smi -L",
    "nvml": "nvidia-smi -q",
    "shm": "df -h /dev/shm",
    "tmp": "df -h /tmp",
    "system": "ulimit -a; free -h",
}


def page_of(
    cluster: ClusterFacts, summary: CheckSummary, *, now_s: float | None = None
) -> tuple[str, list[str]]:
    """Return the page: a sentence, then each host that has a problem, with everything unusual about it.

    `now_s`, in seconds since 1970, is given only by tests.
    """
    problems = [one for one in summary.findings if one.is_problem]
    bad = [host for host in cluster.hosts if any(host.name in one.hosts for one in problems)]
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    num_hosts = len(cluster.hosts)
    title = f"{len(bad)} of {num_hosts} hosts cannot be used" if num_hosts > 1 else "the host cannot be used"
    lines = [f"for the administrator: found by {getpass.getuser()} on {os.uname().nodename}, {at}"]
    for host in bad:
        lines.append(f"{host.name}")
        lines += [f"  {one.text}" for one in problems if host.name in one.hosts]
        words = {"python": host.python, "cwd": host.cwd}
        if host.problem:
            lines.append(f"  see it with: ssh -v {host.name} true")
        lines += [
            f"  see it with: ssh {host.name} {look.format(**words)!r}"
            for question, look in _LOOKS.items()
            if question in host.unanswered or host.answers.get(question, {}).get("problem")
        ]
        for row in summary.rows:
            for value, names, is_odd in row.values:
                if is_odd and host.name in names:
                    usual, others, _ = row.values[0]
                    lines.append(f"  {row.label}: {value}, and {usual} on {folded(others)}")
    return title, lines

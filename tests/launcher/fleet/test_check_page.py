"""The page for the administrator: each unfit host, why, how to see it, and what is odd there."""

from __future__ import annotations

import getpass
import os

from dslaunch.launcher.fleet.check_page import page_of
from dslaunch.launcher.fleet.check_summary import summary_of

from .test_check_summary import CLUSTERS, answers, cluster, host

FAULTS = CLUSTERS["check-many-faults"]


def test_every_unfit_host_has_its_reasons_and_a_command_that_shows_them() -> None:
    title, lines = page_of(FAULTS, summary_of(FAULTS), now_s=0.0)
    assert title == "5 of 8 hosts cannot be used"
    by = f"{getpass.getuser()} on {os.uname().nodename}"
    assert lines == [
        f"for the administrator: found by {by}, 1970-01-01 00:00:00 UTC",
        "node2",
        "  node2 port 22 refused the connection; is sshd running there, on this port?",
        "  see it with: ssh -v node2 true",
        "node3",
        "  no Python at /opt/py/bin/python; every host needs the same path to it, or python= in the hostfile",
        "  see it with: ssh node3 '/opt/py/bin/python --version'",
        '''  see it with: ssh node3 "/opt/py/bin/python -c 'import torch'"''',
        "  Python: none, and 3.11.7 on node[1,4-8]",
        "  PyTorch: none, and 2.6.0, CUDA 12.4 on node[1,4,6-7]",
        "node4",
        "  cannot use the folder /home/ada/job: No such file or directory; start from a folder that every "
        "host has at that path, bring it there with --sync, or say cwd= in the hostfile",
        "  see it with: ssh node4 'ls -ld /home/ada/job'",
        "node5",
        "  slots=8, but there are 7 GPUs; correct slots= in the hostfile, use --include, or look for the "
        "missing GPU with nvidia-smi",
        "  PyTorch: 2.4.0, CUDA 12.4, and 2.6.0, CUDA 12.4 on node[1,4,6-7]",
        "  NVIDIA driver: 535.1, and 550.54.15 on node[1,3-4,6-8]",
        "  GPUs: 7 x NVIDIA H100, and 8 x NVIDIA H100 on node[1,3-4,6-8]",
        "node8",
        "  no answer within 60 s about cwd, torch; look at the host, or give it more time with --timeout",
        "  its answer about gpu cannot be used: num is 'eight'",
        "  see it with: ssh node8 \"/opt/py/bin/python -c 'import torch'\"",
        "  see it with: ssh node8 'ls -ld /home/ada/job'",
    ]


def test_one_host_alone() -> None:
    alone = cluster(host(0, answers=answers(cwd={"problem": "Permission denied"})))
    title, lines = page_of(alone, summary_of(alone), now_s=0.0)
    assert title == "the host cannot be used"
    assert lines[1] == "node1"

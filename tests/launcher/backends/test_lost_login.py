"""Hosts that mpirun cannot reach: the job ends, with the reason, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.exhaustive import few
from tests.lab import Lab, procfs
from tests.launcher.backends.programs import left_over, need
from tests.launcher.command import AT_ONCE_S, Command
from tests.launcher.local_job import Start

pytestmark = pytest.mark.slow

# As Hydra does: it starts the logins, hears of those who connect, and never asks how a login ended.
HYDRA = """#!/usr/bin/env python3
import os, subprocess, sys, time
if "--version" in sys.argv:
    sys.exit(print("HYDRA build details"))
login = subprocess.Popen(["ssh", "node1"])
time.sleep(600)
"""


def put(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_a_login_that_failed_ends_an_mpirun_that_would_wait_for_its_host(
    start_words: Start, tmp_path: Path
) -> None:
    put(tmp_path / "mpirun.mpich", HYDRA)
    put(
        tmp_path / "ssh",
        "#!/bin/sh\necho 'ssh: connect to host node1 port 22: No route to host' >&2\nexit 255\n",
    )
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    (tmp_path / "train.py").write_text("")
    began = time.monotonic()
    job = start_words(
        "--launcher=mpich", "-H", "hosts", "train.py", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    )
    assert job.wait() == 3
    assert time.monotonic() - began < AT_ONCE_S
    assert "ssh: connect to host node1 port 22: No route to host\n" in job.err
    assert (
        "dslaunch: mpich: an ssh to one of the hosts ended with exit code 255, and its words are above"
        in job.err
    )
    job.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("missing", "launcher"),
    few(
        [("nowhere", "openmpi"), ("down", "mpich"), ("down", "openmpi")],
        lambda missing, launcher: missing == "nowhere" and launcher == "openmpi",
    ),
)
def test_a_host_that_is_not_there_ends_the_job_with_its_name(launcher: str, missing: str, lab: Lab) -> None:
    need(launcher)
    folder = lab.shared / f"lost-login-{launcher}-{missing}"
    folder.mkdir()
    if missing == "down":
        # A host that was spoken to a moment ago is asked in silence for the kernel's two minutes
        (lab.head.home / ".ssh" / "config").write_text("Host node2\n  ConnectTimeout 3\n")
        lab.host("node2").poweroff()
    name = "node2" if missing == "down" else "nowhere"
    (folder / "hosts").write_text(f"node1 slots=2\n{name} slots=2\n")
    (folder / "wait.py").write_text("import time\ntime.sleep(600)\n")
    command = Command(lab.head, folder, f"--launcher={launcher}", "-H", "hosts", "wait.py")
    assert command.wait() in (3, 255), command.err
    assert name in command.err
    assert procfs.wait_until(lambda: not left_over(lab), timeout_s=15), left_over(lab)


@pytest.mark.parametrize("launcher", few(["openmpi", "mpich"], lambda launcher: launcher == "openmpi"))
def test_ctrl_c_while_a_login_gets_no_answer_leaves_nothing(launcher: str, lab: Lab) -> None:
    need(launcher)
    folder = lab.shared / f"pending-login-{launcher}"
    folder.mkdir()
    lab.host("node2").drop_port(22)
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    (folder / "wait.py").write_text("import time\ntime.sleep(600)\n")
    command = Command(lab.head, folder, f"--launcher={launcher}", "-H", "hosts", "wait.py")

    def is_pending() -> bool:
        words = [one.argv.split() for one in lab.head.processes()]
        return any(one and one[0].endswith("ssh") and "node2" in one for one in words)

    assert procfs.wait_until(is_pending, timeout_s=AT_ONCE_S), command.err
    command.process.send_signal(signal.SIGINT)
    assert command.wait(AT_ONCE_S) == 130
    assert procfs.wait_until(lambda: not left_over(lab), timeout_s=15), left_over(lab)

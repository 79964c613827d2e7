"""Networks that carry packets one way only, and a node with another version: each end is told,
and nothing is left.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from dslaunch.launcher.rendezvous.messages import PROTOCOL
from tests.exhaustive import few
from tests.lab import Host, Lab
from tests.launcher.command import BUSY_S, Command
from tests.launcher.jobs.test_no_ssh import WORK, Job

pytestmark = pytest.mark.slow

HEARTBEAT_S = 2
WAIT = 'import os, time\nprint("up", os.environ["RANK"], flush=True)\ntime.sleep(600)\n'


@pytest.mark.parametrize("deaf", few(["head", "node2"], lambda deaf: deaf == "head"))
def test_silence_one_way_ends_the_job_with_the_host_s_name(deaf: str, lab: Lab) -> None:
    folder = lab.shared / f"one-way-{deaf}"
    folder.mkdir()
    (folder / "work.py").write_text(WAIT)
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    words = (f"--heartbeat={HEARTBEAT_S}", "--kill_grace=2", "work.py")
    command = Command(lab.head, folder, "-H", "hosts", *words)
    command.wait_for("up ", times=2)
    ends = lab.host("head"), lab.host("node2")
    listener, speaker = ends if deaf == "head" else ends[::-1]
    listener.drop_from(speaker.address)
    began = time.monotonic()
    assert command.wait() == 3
    assert time.monotonic() - began < HEARTBEAT_S + BUSY_S
    said = "nothing heard for [23] s; the host, its network or its agent is down"
    told = "the agent ended: it heard nothing of the launcher for [23] s, as if no packet came through"
    assert re.search(f"dslaunch: node2: ({said}|{told})\n$", command.err), command.err
    assert lab.wait_until_clean(2 * HEARTBEAT_S + BUSY_S) == []


@pytest.fixture
def job(lab: Lab, request: pytest.FixtureRequest) -> Job:
    folder = lab.shared / request.node.name.replace("[", "-").replace("]", "")[-60:]
    (folder / "empty").mkdir(parents=True)
    (folder / "work.py").write_text(WORK)
    (folder / "hosts").write_text("".join(f"{node.name} slots=2\n" for node in lab.nodes[:3]))
    (folder / ".deepspeed_env").write_text("FROM_FILE=value\n")
    return Job(lab, folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("deaf", [2])
def test_silence_one_way_between_nodes_ends_all_without_ssh(job: Job, deaf: int) -> None:
    commands = job.start_and_wait(f"--heartbeat={HEARTBEAT_S}", "work.py", "--daemon")
    listener: Host = job.lab.nodes[deaf]
    listener.drop_from(job.lab.nodes[2 - deaf].address)
    began = time.monotonic()
    assert [one.wait() for one in commands] == [3, 3, 3]
    assert time.monotonic() - began < 3 * HEARTBEAT_S + BUSY_S
    for command in commands[:2]:
        assert "dslaunch: node 2 (node3): nothing heard for " in command.err
    assert "dslaunch: node 0 (node1): nothing heard for " in commands[2].err
    job.assert_clean()


@pytest.mark.exhaustive
def test_a_node_with_another_version_is_told_and_so_are_those_that_wait_for_it(job: Job) -> None:
    other: Path = job.folder / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(
        "import sys\nif 'dslaunch' in sys.orig_argv:\n"
        "    import dslaunch.launcher.rendezvous.messages as messages\n    messages.PROTOCOL = 99\n"
    )
    words = ("--rendezvous_timeout=8", "work.py")
    first = job.start(0, *words)
    newer = job.start(1, *words, env={"PYTHONPATH": str(other)})
    assert newer.wait() == 3
    assert (
        f"node 0 speaks protocol {PROTOCOL}, this node 99; install the same dslaunch everywhere" in newer.err
    )
    assert first.wait() == 3
    why = f"it speaks protocol 99, node 0 speaks {PROTOCOL}; install the same dslaunch everywhere"
    assert f"that called itself node 1 was refused: {why}\n" in first.err
    assert (
        f"it did not come within 8 s, nor node 2 (node3); one that called itself node 1 was refused: {why};"
        in first.err
    )

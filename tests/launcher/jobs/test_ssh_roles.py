"""Trainers and servers on different hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks_of
from tests.docs.test_links import CHECKOUT
from tests.lab import Lab
from tests.launcher.command import AT_ONCE_S, Command, poll

pytestmark = pytest.mark.slow

PAGE = CHECKOUT / "docs" / "launch" / "roles.md"


FETCH = """
import os, urllib.request
host = os.environ["DSLAUNCH_HOSTS_ROLLOUT"]
with urllib.request.urlopen(f"http://{host}:8731/hosts", timeout=60) as answer:
    print(host, os.environ["RANK"], os.environ["WORLD_SIZE"], answer.status, flush=True)
"""


def test_trainers_reach_a_healthy_server_on_another_host_by_its_address(
    lab: Lab, folder: Path, way: str
) -> None:
    (folder / "fetch.py").write_text(FETCH)
    command = Command(
        lab.head, folder, "-H", "hosts", "--role", "trainer=node[1-2]", "--role", "rollout=node4",
        "echo $DSLAUNCH_ROLE of $DSLAUNCH_HOSTS_TRAINER; python -m http.server 8731",
        "--role_health", "rollout=http://:8731/hosts", "fetch.py",
    )  # fmt: skip
    assert command.wait() == 0, f"{command.out}\n{command.err}"
    first, second, _, server = (node.address for node in lab.nodes)
    assert command.lines("node4:rollout")[0] == f"rollout of {first},{second}"
    said = sorted(line for rank in range(4) for line in command.lines(f"node{1 + rank // 2}:{rank}"))
    assert said == [f"{server} {rank} 4 200" for rank in range(4)]
    assert "no role, so no part in the job: node3" in command.err
    assert "rollout on node4 is healthy after" in command.err
    assert "4 workers ended with code 0" in command.err
    assert "on 2 hosts; rollout: 1 server" in command.err
    assert lab.wait_until_clean() == []


@pytest.mark.exhaustive  # each process imports torch and transformers
def test_the_guide_s_trainers_send_weights_to_its_server_on_another_host(lab: Lab, folder: Path) -> None:
    for block in blocks_of(PAGE):
        if block.kind == "file":
            (folder / block.detail).write_text(block.text)
    subprocess.run([sys.executable, "base.py"], cwd=folder, check=True, capture_output=True)
    command = Command(
        lab.head, folder, "-H", "hosts", "--role", "trainer=node[1-2]:0", "--role", "rollout=node4",
        "echo $DSLAUNCH_ROLE of $DSLAUNCH_HOSTS_TRAINER; exec python serve.py 8731",
        "--role_health", "rollout=http://:8731/health", "train.py",
    )  # fmt: skip
    assert command.wait(180) == 0, f"{command.out}\n{command.err}"
    addresses = [node.address for node in lab.nodes]
    assert command.lines("node4:rollout") == [
        f"rollout of {addresses[0]},{addresses[1]}",
        "serving on port 8731",
    ]
    assert command.lines("node1:0") == [
        f"step {step}: the server generates with these weights: True" for step in range(3)
    ]
    assert lab.wait_until_clean() == []


def test_the_loss_of_a_server_s_host_ends_the_trainers(lab: Lab, folder: Path) -> None:
    (folder / "wait.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    command = Command(
        lab.head, folder, "-H", "hosts", "--role", "rollout=node3",
        "python -m http.server 8731 --bind 127.0.0.1", "--role_health=rollout=8731",
        "--heartbeat=3", "--kill_grace=2", "wait.py",
    )  # fmt: skip
    command.wait_for("up", times=6)
    assert "rollout on node3: the server listens at 127.0.0.1 only, where no other host" in command.err
    lab.nodes[2].die()
    assert command.wait() == 3
    assert command.err.splitlines()[-1].startswith("dslaunch: node3: ")
    poll(lambda: lab.wait_until_clean() == [], "the end of the trainers", command, AT_ONCE_S)

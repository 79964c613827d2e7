"""Agents that stay connected while a job starts again, on real hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launcher.command import Command, poll

pytestmark = pytest.mark.slow

# In the first attempt rank 1 fails, and its host cannot be prepared again. In the next one rank 0 kills its
# agent.
WORK = """
import json, os, pathlib, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
pathlib.Path(f"agents-{attempt}-{rank}").write_text(json.dumps([attempt, os.uname().nodename, os.getppid()]))
here = [pathlib.Path(f"up-{attempt}-{number}") for number in range(2)]
here[rank].touch()
while not all(path.exists() for path in here): time.sleep(0.01)
if (attempt, rank) == (0, 1):
    pathlib.Path("broken").touch()
    sys.exit(7)
if (attempt, rank) == (1, 0):
    os.kill(os.getppid(), signal.SIGKILL)
if attempt < 2:
    time.sleep(600)
"""
ENTER = 'if [ "$(uname -n)" = node2 ] && [ -e broken ]; then echo it is broken >&2; exit 1; fi\n'


def test_agents_of_hosts_that_are_fine_stay_and_others_are_connected_anew(lab: Lab, folder: Path) -> None:
    (folder / "work.py").write_text(WORK)
    (folder / "enter.sh").write_text(ENTER)
    (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes[:3]))
    words = ("--num_nodes=2", "--spares=1", "--max_restarts=2", "--min_uptime=0", "--kill_grace=2")
    command = Command(lab.head, folder, "-H", "hosts", *words, "--venv_script=enter.sh", "work.py")
    assert command.wait() == 0, command.err
    assert "node3 instead of node2 (--venv_script=enter.sh ended with 1: it is broken)" in command.err
    assert "with node1 again (the agent ended: it was killed by SIGKILL)" in command.err
    agents = {}
    for path in folder.glob("agents-*"):
        attempt, host, agent = json.loads(path.read_text())
        agents[attempt, host] = agent
    assert [*sorted(agents)] == [
        (0, "node1"), (0, "node2"), (1, "node1"), (1, "node3"), (2, "node1"), (2, "node3"),
    ]  # fmt: skip
    assert agents[1, "node1"] == agents[0, "node1"]
    assert agents[2, "node3"] == agents[1, "node3"]
    assert agents[2, "node1"] != agents[1, "node1"]
    assert lab.wait_until_clean() == []


def test_the_agent_of_a_spare_waits_before_it_is_needed(lab: Lab, folder: Path) -> None:
    """So the spare takes part although nothing can log in there any more."""
    (folder / "work.py").write_text(
        "import torch\nimport os, time\n"
        "while os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': time.sleep(0.01)\n"
        "print(os.uname().nodename)\n"
    )
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "torch.py").write_text(
        "import os\nopen(f'by-{os.uname().nodename}', 'w').close()\n"
    )
    (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes[:3]))
    words = ("--num_nodes=2", "--spares=1", "--max_restarts=1", "--min_uptime=0", "--log_level=debug")
    env = {"PYTHONPATH": str(folder / "site-packages")}
    command = Command(lab.head, folder, "-H", "hosts", *words, "work.py", env=env)
    poll(lambda: " waits, in case a host is lost" in command.err, "the spare", command)
    poll((folder / "by-node3").exists, "its imports", command)
    lab.host("node3").sshd_kill()
    lab.host("node2").die()
    assert command.wait() == 0, command.err
    assert sorted(line.partition(" | ")[2] for line in command.out.splitlines()) == ["node1", "node3"]
    assert "node3 instead of node2 (" in command.err
    lab.host("node3").sshd_start()
    assert lab.wait_until_clean() == []

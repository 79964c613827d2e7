"""Jobs on real hosts that go on after a failure, with the same hosts, with spares, or with fewer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launcher.command import Command, poll

pytestmark = pytest.mark.slow

# Says where and what it is, and in an attempt named on its command line fails as told there: attempt:rank:code.
WORK = """
import json, os, pathlib, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(json.dumps({"attempt": attempt, "rank": rank, "host": os.uname().nodename, "port": os.environ["MASTER_PORT"],
    "world": os.environ["WORLD_SIZE"], "max": os.environ["TORCHELASTIC_MAX_RESTARTS"], "id": os.environ["TORCHELASTIC_RUN_ID"]}),
    flush=True)
here = [pathlib.Path(f"up-{attempt}-{number}") for number in range(int(os.environ["WORLD_SIZE"]))]
here[rank].touch()
for word in sys.argv[1:]:
    if word == "wait":
        while attempt == 0 and not pathlib.Path("go").exists(): time.sleep(0.01)
    elif word.count(":") == 2:
        when, who, code = map(int, word.split(":"))
        if when == attempt:
            while not all(path.exists() for path in here): time.sleep(0.01)
            if who == rank: sys.exit(code)
            time.sleep(600)
"""


@pytest.fixture
def folder(lab: Lab, request: pytest.FixtureRequest) -> Path:
    path = lab.shared / request.node.name[:80]
    path.mkdir()
    (path / "work.py").write_text(WORK)
    (path / "hosts").write_text("".join(f"{node.name} slots=2\n" for node in lab.nodes))
    return path


def launch(lab: Lab, folder: Path, *words: str) -> Command:
    return Command(lab.head, folder, "-H", "hosts", "--kill_grace=2", "--min_uptime=0", *words)


def attempts(command: Command) -> list[dict[int, dict[str, str]]]:
    """For each attempt what each rank said."""
    found: dict[int, dict[int, dict[str, str]]] = {}
    for line in command.out.splitlines():
        said = json.loads(line.partition(" | ")[2])
        found.setdefault(said["attempt"], {})[said["rank"]] = said
    return [found[number] for number in sorted(found)]


def hosts(attempt: dict[int, dict[str, str]]) -> str:
    return " ".join(attempt[rank]["host"] for rank in sorted(attempt))


def test_a_failed_rank_starts_the_whole_job_again_on_the_same_hosts(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--num_nodes=2", "--max_restarts=2", "work.py", "--", "0:3:7", "1:0:8")
    assert command.wait() == 0, command.err
    found = attempts(command)
    assert [hosts(one) for one in found] == ["node1 node1 node2 node2"] * 3
    assert len({one[0]["port"] for one in found}) == 3, "a new port for each attempt"
    assert len({one[0]["id"] for one in found}) == 1
    assert {said["max"] for one in found for said in one.values()} == {"2"}
    assert "rank 3 on node2" in command.err
    assert "dslaunch: starting again (2 of 2 restarts)" in command.err
    assert lab.wait_until_clean() == []


def test_the_last_failure_is_the_exit_code(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--num_nodes=1", "--max_restarts=1", "work.py", "0:0:7", "1:1:9")
    assert command.wait() == 9
    assert "dslaunch: not started again: the one restart is used" in command.err


def test_a_spare_takes_the_place_and_the_ranks_of_a_lost_host(lab: Lab, folder: Path) -> None:
    command = launch(
        lab, folder, "--num_nodes=3", "--spares=1", "--max_restarts=1", "--heartbeat=2", "work.py", "wait"
    )
    command.wait_for('"attempt": 0', times=6)
    lab.host("node2").unplug()
    assert command.wait() == 0, command.err
    first, second = attempts(command)
    assert hosts(first) == "node1 node1 node2 node2 node3 node3"
    assert hosts(second) == "node1 node1 node4 node4 node3 node3"
    assert "node4 instead of node2 (nothing heard for 2 s" in command.err
    assert lab.wait_until_clean(15) == []


def test_a_host_that_cannot_be_reached_at_the_start_is_replaced_without_a_restart(
    lab: Lab, folder: Path
) -> None:
    lab.host("node1").sshd_kill()
    command = launch(lab, folder, "--num_nodes=2", "--spares=2", "work.py")
    assert command.wait() == 0, command.err
    (only,) = attempts(command)
    assert hosts(only) == "node3 node3 node2 node2"
    assert "dslaunch: starting with other hosts; node3 instead of node1 (node1 port 22 refused" in command.err


def test_an_elastic_job_goes_on_with_fewer_hosts(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--elastic_training", "--min_elastic_nodes=2", "work.py", "wait")
    command.wait_for('"attempt": 0', times=8)
    lab.host("node1").die()
    lab.host("node4").die()
    assert command.wait() == 0, command.err
    second = attempts(command)[-1]
    assert hosts(second) == "node2 node2 node3 node3"
    assert {said["world"] for said in second.values()} == {"4"}


def test_what_fails_at_once_is_not_started_again(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--num_nodes=1", "--min_uptime=30", "--max_restarts=5", "work.py", "0:0:7")
    assert command.wait() == 7
    assert "not started again: it failed" in command.err
    assert len(attempts(command)) == 1


def test_an_interrupt_is_no_failure(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--num_nodes=1", "--max_restarts=5", "work.py", "wait")
    command.wait_for('"attempt": 0', times=2)
    command.process.terminate()
    assert command.wait() == 143
    assert "starting again" not in command.err
    poll(lambda: lab.processes() == [], "an empty lab", command)


def test_an_import_error_is_not_started_again_and_again(lab: Lab, folder: Path) -> None:
    """All that was said about restarts is --max_restarts: a mistake in the script ends the job at its first try."""
    (folder / "work.py").write_text("print('here', flush=True)\nimport no_such_module\n")
    command = Command(lab.head, folder, "-H", "hosts", "--max_restarts=5", "work.py")
    assert command.wait() == 1
    lines = command.out.splitlines()
    assert len(lines) == len(set(lines)), "no rank ran twice"
    assert "ModuleNotFoundError: No module named 'no_such_module'" in command.err
    assert "dslaunch: not started again: it failed " in command.err
    assert "starting again" not in command.err
    assert lab.wait_until_clean() == []


def test_a_cut_link_in_the_middle_of_a_job_costs_one_restart_and_the_ranks_stay(
    lab: Lab, folder: Path
) -> None:
    """The host notices it too: its workers are gone before anybody plugs it in again."""
    words = ("--num_nodes=3", "--spares=1", "--max_restarts=1", "--heartbeat=2", "work.py", "wait")
    command = launch(lab, folder, *words)
    command.wait_for('"attempt": 0', times=6)
    lost = lab.host("node3")
    lost.link_down()
    assert command.wait() == 0, command.err
    first, second = attempts(command)
    assert hosts(first) == "node1 node1 node2 node2 node3 node3"
    assert hosts(second) == "node1 node1 node2 node2 node4 node4"
    assert "dslaunch: starting again (1 of 1 restarts); node4 instead of node3" in command.err
    assert lab.wait_until_clean(15) == [], "while the link is still down"

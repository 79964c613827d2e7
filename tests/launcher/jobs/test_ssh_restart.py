"""Jobs on real hosts that go on after a failure, with the same hosts, with spares, or with fewer."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.exhaustive import few
from tests.lab import Lab
from tests.launcher.command import Command

pytestmark = pytest.mark.slow

CLOCK_S = 0.01  # between the wall clock, in whole milliseconds, and the one that durations are from

# Says where and what it is, and in an attempt named on its command line fails as told there:
# attempt:rank:code.
WORK = """
import json, os, pathlib, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(json.dumps({"attempt": attempt, "rank": rank, "host": os.uname().nodename,
    "port": os.environ["MASTER_PORT"], "world": os.environ["WORLD_SIZE"],
    "mesh": os.environ.get("DSLAUNCH_MESH", ""),
    "max": os.environ["TORCHELASTIC_MAX_RESTARTS"], "id": os.environ["TORCHELASTIC_RUN_ID"]}), flush=True)
here = [pathlib.Path(f"up-{attempt}-{number}") for number in range(int(os.environ["WORLD_SIZE"]))]
here[rank].touch()
for word in sys.argv[1:]:
    if word == "wait":
        while attempt == 0: time.sleep(0.01)
    elif word.startswith("wait:"):
        while attempt == int(word[5:]): time.sleep(0.01)
    elif word.count(":") == 2:
        when, who, code = map(int, word.split(":"))
        if when == attempt:
            while not all(path.exists() for path in here): time.sleep(0.01)
            if who == rank: sys.exit(code)
            time.sleep(600)
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "work.py").write_text(WORK)
    return folder


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


@pytest.mark.parametrize("launcher", few(["ssh", "openssh"], lambda launcher: launcher == "ssh"))
def test_a_failed_rank_starts_the_whole_job_again_on_the_same_hosts(
    lab: Lab, folder: Path, launcher: str
) -> None:
    words = (f"--launcher={launcher}", "--num_nodes=2", "--max_restarts=2", "--report=report.json")
    command = launch(lab, folder, *words, "--log_dir=logs", "work.py", "--", "0:3:7", "1:0:8")
    assert command.wait() == 0, command.err
    found = attempts(command)
    assert [hosts(one) for one in found] == ["node1 node1 node2 node2"] * 3
    assert {said["attempt"] for said in found[2].values()} == {2}
    assert len({one[0]["port"] for one in found}) == 3, "a new port for each attempt"
    assert all(len({said["port"] for said in one.values()}) == 1 for one in found)
    assert len({said["id"] for one in found for said in one.values()}) == 1
    assert {said["max"] for one in found for said in one.values()} == {"2"}
    assert_three_attempts_are_told_apart(command.err)
    check_files(folder / "logs" / "latest")
    check_report(json.loads((folder / "report.json").read_text()))
    assert (folder / "logs" / "latest" / "report.json").read_text() == (folder / "report.json").read_text()
    assert lab.wait_until_clean() == []


def assert_three_attempts_are_told_apart(err: str) -> None:
    """What each attempt failed with stands before the sentence on the next one."""
    places = [
        err.index(text)
        for text in (
            "dslaunch: rank 3 on node2",
            "dslaunch: starting again (1 of 2 restarts)",
            "dslaunch: rank 0 on node1",
            "dslaunch: starting again (2 of 2 restarts)",
        )
    ]
    assert places == sorted(places), err


def check_files(run: Path) -> None:
    """Each attempt has files of its own, and in them is what its ranks said."""
    for number in range(3):
        files = sorted((run / f"attempt_{number}").iterdir())
        assert len(files) == 8
        said = [json.loads(line) for one in files for line in one.read_text().splitlines()]
        assert sorted((one["attempt"], one["rank"]) for one in said) == [(number, rank) for rank in range(4)]


def check_report(report: dict[str, Any]) -> None:
    """The last attempt at the top, and below it all of them."""
    assert (report["exit_code"], report["culprit"]) == (0, None)
    found = report["attempts"]
    assert [one["number"] for one in found] == [0, 1, 2]
    assert [one["hosts"] for one in found] == [["node1", "node2"]] * 3
    assert [one["exit_code"] for one in found] == [7, 8, 0]
    assert [one["culprit"] and one["culprit"]["rank"] for one in found] == [3, 0, None]
    assert [one["decision"] for one in found] == [
        "starting again (1 of 2 restarts)",
        "starting again (2 of 2 restarts)",
        "",
    ]
    began = [datetime.fromisoformat(one["began_at"]).timestamp() for one in found]
    for place, one in enumerate(found[:-1]):
        assert 0 < one["phases_s"]["started"] < one["duration_s"]
        assert began[place] + one["duration_s"] <= began[place + 1] + CLOCK_S


def test_the_last_failure_is_the_exit_code(lab: Lab, folder: Path) -> None:
    command = launch(lab, folder, "--num_nodes=1", "--max_restarts=1", "work.py", "0:0:7", "1:1:9")
    assert command.wait() == 9
    assert "dslaunch: not started again: the one restart is used" in command.err


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


@pytest.mark.exhaustive
def test_deepspeed_s_words_for_how_many_hosts(lab: Lab, folder: Path) -> None:
    """Three of four hosts take part; the fourth stands in for a lost one,
    and without another there are two.
    """
    words = ("--elastic_training", "--min_elastic_nodes=2", "--max_elastic_nodes=3", "--heartbeat=2")
    command = launch(lab, folder, *words, "work.py", "wait", "wait:1")
    command.wait_for('"attempt": 0', times=6)
    lab.host("node2").die()
    command.wait_for('"attempt": 1', times=6)
    lab.host("node3").die()
    assert command.wait() == 0, command.err
    assert [hosts(one) for one in attempts(command)] == [
        "node1 node1 node2 node2 node3 node3",
        "node1 node1 node4 node4 node3 node3",
        "node1 node1 node4 node4",
    ]
    assert {said["world"] for said in attempts(command)[2].values()} == {"4"}


@pytest.mark.exhaustive
def test_hosts_that_count_their_own_slots_keep_that_number(lab: Lab, folder: Path) -> None:
    """They are looked at once, before the first attempt, the spare too."""
    (folder / "hosts").write_text("".join(f"{node.name} slots=auto\n" for node in lab.nodes[:3]))
    words = ("--spares=1", "--max_restarts=1", "--heartbeat=2", "work.py", "wait")
    command = launch(lab, folder, *words)
    command.wait_for('"attempt": 0', times=2)
    lab.host("node1").die()
    assert command.wait() == 0, command.err
    assert [hosts(one) for one in attempts(command)] == ["node1 node2", "node3 node2"]
    assert command.err.count("slots=auto: looking at 3 hosts") == 1


def test_an_import_error_is_not_started_again_and_again(lab: Lab, folder: Path) -> None:
    """All that was said about restarts is --max_restarts: a mistake in the script ends the
    job at its first try.
    """
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
    """The host notices it too: its workers are gone before it is plugged in again."""
    (folder / "hosts").write_text("node1 slots=1\nnode3 slots=2\nnode4 slots=2\n")
    words = ("--num_nodes=2", "--spares=1", "--max_restarts=1", "--heartbeat=2", "work.py", "wait")
    command = launch(lab, folder, *words)
    command.wait_for('"attempt": 0', times=3)
    lost = lab.host("node3")
    lost.link_down()
    assert command.wait() == 0, command.err
    first, second = attempts(command)
    assert hosts(first) == "node1 node3 node3"
    assert hosts(second) == "node1 node4 node4"
    assert "(1 of 1 restarts); node4 instead of node3 (nothing heard for 2 s" in command.err
    assert lab.wait_until_clean(15) == [], "while the link is still down"

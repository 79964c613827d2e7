"""`dslaunch check --bandwidth` on real hosts: every pair is measured, and a slow link or host is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab
from tests.launcher.command import TIMEOUT_S, Command
from tests.launcher.local_job import Job

pytestmark = pytest.mark.slow

SLOW_MBIT = 20  # the lab's cables carry more than 1000
OTHER_MBIT = 80  # four times that, and far less than what other programs of this machine leave
PAIRS = [["node1", "node2"], ["node1", "node3"], ["node2", "node3"]]
WORDS = ("check", "-H", "hosts", "--num_nodes=3", "--no_torch", "--nccl", "--json")


def measured(lab: Lab, folder: Path, exit_code: int) -> dict[str, Any]:
    command = Command(lab.head, folder, *WORDS)
    assert command.wait(4 * TIMEOUT_S) == exit_code, command.out + command.err
    report: dict[str, Any] = json.loads(command.out)
    assert report["exit_code"] == exit_code
    network: dict[str, Any] = report["network"]
    assert network["backend"] == "gloo"
    return network


@pytest.mark.exhaustive
def test_hosts_that_are_alike_have_no_slow_link(lab: Lab, folder: Path) -> None:
    for node in lab.nodes[:3]:  # slower than what other programs of this machine could make of it
        node.slow_down(SLOW_MBIT)
    network = measured(lab, folder, 0)
    assert network["problems"] == []
    assert sorted(one["hosts"] for one in network["pairs"]) == PAIRS
    assert network["collectives"].keys() == {"all_reduce", "all_gather", "reduce_scatter"}
    speeds = [speed for one in network["pairs"] for speed in one["bytes_per_s"]]
    assert speeds == pytest.approx([SLOW_MBIT * 1e6 / 8] * 6, rel=0.5)
    assert lab.wait_until_clean() == []


@pytest.mark.exhaustive
def test_a_link_that_is_slow_one_way_is_named(lab: Lab, folder: Path) -> None:
    for node in lab.nodes[:3]:
        node.slow_down(OTHER_MBIT)
    lab.host("node1").slow_down(SLOW_MBIT, to=lab.host("node3"))
    (problem,) = measured(lab, folder, 1)["problems"]
    assert problem["hosts"] == ["node1", "node3"]
    assert "the link between them carries 2." in problem["text"]


@pytest.mark.exhaustive
def test_a_host_whose_links_are_all_slow_is_named_and_not_its_links(lab: Lab, folder: Path) -> None:
    lab.host("node2").slow_down(SLOW_MBIT)
    for name in ("node1", "node3"):
        lab.host(name).slow_down(OTHER_MBIT)
    (problem,) = measured(lab, folder, 1)["problems"]
    assert problem["hosts"] == ["node2"]
    assert "even its fastest link carries 2." in problem["text"]


def test_what_the_ranks_that_measure_say_is_shown(tmp_path: Path) -> None:
    broken = tmp_path / "site" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcudart is lost')\n")
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1 devices=1\n")
    words = ["check", "-H", "hosts", "--no_torch", "--bandwidth"]
    job = Job(tmp_path, words, env={"PYTHONPATH": str(broken.parent)})
    try:
        assert job.wait() == 1
    finally:
        job.end()
    assert "dslaunch: the ranks that measure:\n" in job.err
    assert "ImportError: libcudart is lost" in job.err

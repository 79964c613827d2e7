"""`dslaunch drill`: faults in a run, and the way back from each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launcher.command import Command
from tests.launcher.local_job import Job

# Its checkpoint is a file, and its steps are told by report().
TRAIN = """
import os, pathlib, time
import dslaunch
done = pathlib.Path("done")
step = int(done.read_text()) if done.exists() else 0
while step < 5000:
    time.sleep(0.02)
    step += 1
    dslaunch.report(step=step)
    if step % 50 == 0 and os.environ["RANK"] == "0":
        pathlib.Path("new").write_text(str(step))
        os.replace("new", "done")
"""
STAGES = ("detect", "decide", "stop", "connect", "prepare", "start", "first step")


@pytest.mark.slow
def test_faults_of_a_rank_are_made_here_and_the_way_back_is_measured(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    job = Job(tmp_path, ["drill", "--num_gpus=2", "--json", "--steps=60", "--limit=60", "train.py"])
    try:
        assert job.wait(60.0) == 0, job.err
        assert job.survivors() == []
    finally:
        job.end()
    found = json.loads(job.out)
    assert [one["fault"] for one in found["faults"]] == ["rank-raises", "rank-killed"]
    for one in found["faults"]:
        assert (one["rank"], one["host"], one["why_not"]) == (1, "localhost", None)
        assert tuple(one["stages_s"]) == STAGES
        assert one["total_s"] == pytest.approx(sum(one["stages_s"].values()), abs=0.1)
        assert 0 <= one["steps_again"] < 200
    assert "KeyboardInterrupt" in found["faults"][0]["cause"]
    assert "SIGKILL" in found["faults"][1]["cause"]
    assert found["spent_s"]["restart"] > 0 < found["goodput"] < 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--fault=host-killed"], "--fault host-killed: all ranks run on this machine"),
        (["--fault=host-killed", "--snapshot_every=9"], "--fault host-killed: all ranks run on this machine"),
        (["--fault=cable-cut"], "--fault cable-cut: cannot be made: it would cut the way"),
        (["--fault=rank-kiled"], "--fault rank-kiled: is no fault; did you mean rank-killed?"),
        (["--events=e"], "dslaunch drill and --events exclude each other"),
    ],
)
def test_what_cannot_be_made_here_is_refused_by_name(words: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    job = Job(tmp_path, ["drill", "--num_gpus=2", *words, "train.py"])
    try:
        assert (job.wait(), job.out) == (2, "")
        assert why in job.err
    finally:
        job.end()


@pytest.mark.slow
def test_a_program_that_ends_before_a_fault_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    job = Job(tmp_path, ["drill", "--num_gpus=1", "train.py"])
    try:
        assert job.wait() == 1, job.err
        assert "the job has ended before 10 steps after the start: rank 0 on localhost" in job.err
    finally:
        job.end()


@pytest.mark.slow
def test_a_host_is_killed_and_another_one_frozen(lab: Lab, folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in lab.nodes[:3]))
    faults = ("--fault=host-killed,host-frozen", "--heartbeat=3", "--kill_grace=2", "--snapshot_every=99")
    words = (
        "drill",
        "-H",
        "hosts",
        "--num_nodes=2",
        "--spares=1",
        *faults,
        "--steps=20",
        "--json",
        "train.py",
    )
    command = Command(lab.head, folder, *words)
    assert command.wait() == 0, command.err
    killed, frozen = json.loads(command.out)["faults"]
    assert (killed["fault"], killed["host"]) == ("host-killed", "node2")
    assert (frozen["fault"], frozen["host"]) == ("host-frozen", "node3"), "the spare"
    assert frozen["stages_s"]["detect"] >= 2.0, "of a heartbeat of 3 s"
    assert lab.wait_until_clean() == []

"""Runs that are kept with the speeds of a cluster, while others write the same file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dslaunch.launcher.fit.measured_speeds import ClusterSpeeds, read_speeds, write_speeds
from dslaunch.launcher.fit.past_run import KINDS, CompareRun
from dslaunch.launcher.job.mesh import HostSlots
from dslaunch.launcher.run.speeds_folder import keep_run

CLUSTER = ClusterSpeeds(
    hosts=(HostSlots("node1", 2),),
    device="none",
    device_bytes=0,
    torch="2.13",
    num_cores=2,
    num_threads=1,
    measured_at="2026-11-29T10:00:00+00:00",
    arithmetic={},
    memory={},
    inside={},
    between={},
    launch_s=1e-6,
    update_bytes_per_s=1e9,
    copied_bytes_per_s=0.0,
    disk_bytes_per_s=1e9,
)
SECONDS = dict.fromkeys(KINDS, 1.0)
RUN = CompareRun(job="train-1", day="2026-11-29", predicted=SECONDS, measured=SECONDS)


def test_two_runs_that_are_planned_at_the_same_time_are_both_kept(tmp_path: Path) -> None:
    path = tmp_path / "node1.json"
    write_speeds(path, CLUSTER)
    for name in ("train-1", "train-2"):  # each was planned by the file as it was at first
        assert keep_run(path, CLUSTER, replace(RUN, job=name)) == ""
    assert [one.job for one in read_speeds(path).runs] == ["train-1", "train-2"]


def test_speeds_that_were_measured_anew_meanwhile_stay(tmp_path: Path) -> None:
    path = tmp_path / "node1.json"
    anew = replace(CLUSTER, measured_at="2026-11-29T11:00:00+00:00")
    write_speeds(path, anew)
    assert "the hosts were measured anew meanwhile" in keep_run(path, CLUSTER, RUN)
    assert read_speeds(path) == anew


def test_a_run_that_cannot_be_kept_is_told_why(tmp_path: Path) -> None:
    assert "No such file or directory" in keep_run(tmp_path / "gone.json", CLUSTER, RUN)
    assert "No such file or directory" in keep_run(tmp_path / "gone" / "node1.json", CLUSTER, RUN)

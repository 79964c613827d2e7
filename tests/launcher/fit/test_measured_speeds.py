"""Measured speeds of a cluster: the slowest rank counts, and files that are no such files are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.fit.measured_speeds import (
    ClusterSpeeds,
    cluster_of,
    file_name,
    find_speeds,
    read_speeds,
    speeds_as_dict,
    write_speeds,
)
from dslaunch.launcher.fit.past_run import UPDATE, WAITING, CompareRun, factors_of
from dslaunch.launcher.fit.step_time import BUBBLE, COMMUNICATION, COMPUTE
from dslaunch.launcher.job.mesh import HostSlots

HOSTS = (HostSlots("node1", 2),)


def told(speed: float, **more: Any) -> str:
    """Return the line of a rank that is as fast as that."""
    return json.dumps(
        {
            "device": "",
            "device_bytes": 0,
            "torch": "2.13",
            "num_cores": 3,
            "num_threads": 1,
            "arithmetic": {"float32": [[10, speed], [100, 2 * speed]]},
            "memory": {"float32": speed},
            "inside": {"all_gather": [[1000, 1 / speed]]},
            "between": {},
            "launch_s": 1 / speed,
            "update_bytes_per_s": speed,
            "copied_bytes_per_s": 0,
            "disk_bytes_per_s": speed,
            **more,
        }
    )


def cluster(hosts: tuple[HostSlots, ...] = HOSTS) -> ClusterSpeeds:
    return cluster_of([told(100.0), told(50.0)], hosts)


def test_the_slowest_rank_counts() -> None:
    speeds = cluster().speeds()
    assert speeds.arithmetic == (("float32", ((10.0, 50.0), (100.0, 100.0))),)
    assert speeds.inside == (("all_gather", ((1000.0, 1 / 50),)),) == speeds.between
    assert (speeds.launch_s, speeds.update_bytes_per_s, speeds.hidden) == (1 / 50, 50.0, 0.5)
    with pytest.raises(ValueError, match="KeyError"):
        cluster_of(["{}"], HOSTS)


def test_ranks_of_hosts_that_send_other_amounts_have_the_curve_of_the_slowest() -> None:
    ranks = [
        told(1.0, inside={}),  # alone on its host
        told(1.0, inside={"all_gather": [[500, 1.0], [1000, 2.0]]}),
        told(1.0, inside={"all_gather": [[700, 3.0], [1400, 5.0]]}),
    ]
    assert cluster_of(ranks, HOSTS).inside == {"all_gather": ((700.0, 3.0), (1400.0, 5.0))}


def test_a_file_has_all_that_was_measured(tmp_path: Path) -> None:
    run = CompareRun(
        job="train-1",
        day="2026-11-29",
        predicted={COMPUTE: 1.0, WAITING: 0.5, UPDATE: 0.01},
        measured={COMPUTE: 2.0, WAITING: 0.25, UPDATE: 0.5},
    )
    path = tmp_path / file_name(HOSTS, "none")
    write_speeds(path, cluster().with_run(run).with_run(run))
    found = read_speeds(path)
    assert found == replace(cluster(), runs=(run,), measured_at=found.measured_at)
    # A part that is small in the plan has no factor.
    assert factors_of(found.runs) == {COMPUTE: 2.0, COMMUNICATION: 0.5, BUBBLE: 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON, and no file of measured speeds; measure the hosts anew"),
        ("[]", "is no file of measured speeds; measure"),
        (json.dumps({"kind": "another"}), "is no file of measured speeds; measure"),
        (json.dumps(speeds_as_dict(cluster()) | {"version": 9}), "has version 9, and this dslaunch reads 1;"),
        (json.dumps(speeds_as_dict(cluster()) | {"launch_s": "x"}), "is damaged (ValueError: could not"),
        (json.dumps(speeds_as_dict(cluster()) | {"hosts": []}), "is damaged (ValueError: it names no hosts)"),
        (json.dumps(speeds_as_dict(cluster()) | {"inside": [1]}), "is damaged (AttributeError: "),
        (
            json.dumps(speeds_as_dict(cluster()) | {"memory": {"f": -1}}),
            "is damaged (ValueError: -1 is no speed)",
        ),
        (
            json.dumps(speeds_as_dict(cluster()) | {"launch_s": 1e308}),
            "is damaged (ValueError: 1e+308 is no speed)",
        ),
        (
            json.dumps(speeds_as_dict(cluster()) | {"inside": {"all_gather": [[0, 1]]}}),
            "is damaged (ValueError: a curve has a point at 0)",
        ),
        (json.dumps(speeds_as_dict(cluster()) | {"runs": [{}]}), "is damaged (KeyError: "),
    ],
)
def test_a_file_that_is_none_of_these_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_speeds(path, option="--speeds")
    assert str(caught.value).startswith(f"--speeds={path}: {message}")


def test_the_file_that_fits_the_hosts_best_is_found(tmp_path: Path) -> None:
    more = (HostSlots("node1", 2), HostSlots("node2", 2))
    write_speeds(tmp_path / "more.json", cluster(more))
    write_speeds(tmp_path / "other.json", cluster((HostSlots("node3", 2),)))

    def found(*hosts: HostSlots) -> str | None:
        one = find_speeds(tmp_path, hosts, lambda one: not one.is_on_gpu)
        return None if one is None else one[0].name

    assert found(*HOSTS) == "more.json"
    write_speeds(tmp_path / "same.json", cluster((HostSlots("node1", 4),)))
    assert found(*HOSTS) == "same.json"
    write_speeds(tmp_path / "exact.json", cluster())
    assert found(*HOSTS) == "exact.json"
    assert found(HostSlots("node4", 2)) is None
    assert find_speeds(tmp_path, HOSTS, lambda one: one.is_on_gpu) is None
    assert find_speeds(None, HOSTS, lambda one: True) is None

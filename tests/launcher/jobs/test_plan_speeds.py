"""Speeds of this machine, measured once: a plan then tells one time, and a run corrects the next plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.local_job import Job

pytestmark = pytest.mark.slow

LIMIT_S = 150.0  # torch is imported in each command, on a machine that may be busy
HOSTS = ("-H", "localhost:2")
TRAIN = """
import torch
import dslaunch
from torch import nn
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
config = {'train_micro_batch_size_per_gpu': 64, 'zero_optimization': {'stage': 1}}
config['optimizer'] = {'type': 'AdamW', 'params': {'lr': 0.001}}
engine, *_ = dslaunch.initialize(model=model, model_parameters=model.parameters(), config=config)
x = torch.ones(64, 64)
for _ in range(200):
    engine.backward((engine(x) - x).square().mean())
    engine.step()
"""


def own_state(folder: Path) -> dict[str, str]:
    """Return what keeps the speeds from the plans of other tests."""
    return {"XDG_STATE_HOME": str(folder / "state")}


def done(folder: Path, *words: str) -> str:
    job = Job(folder, words, env=own_state(folder))
    try:
        assert job.wait(LIMIT_S) == 0, job.out + job.err
        return job.out
    finally:
        job.end()


def test_a_machine_is_measured_and_a_run_corrects_its_plans(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    speeds: dict[str, Any] = json.loads(done(tmp_path, "check", *HOSTS, "--bandwidth", "--json"))["speeds"]
    assert speeds["arithmetic"].keys() == speeds["memory"].keys() == {"float32", "bfloat16"}
    assert speeds["inside"].keys() == {"all_gather", "reduce_scatter", "all_reduce", "scalar"}
    assert (speeds["between"], speeds["copied_bytes_per_s"]) == ({}, 0)
    assert min(speeds[name] for name in ("launch_s", "update_bytes_per_s", "disk_bytes_per_s")) > 0
    kept = Path(speeds["file"])
    assert kept.parent == tmp_path / "state" / "dslaunch" / "speeds"

    done(tmp_path, *HOSTS, "--log_dir", "logs", "train.py")
    out = done(tmp_path, "plan", *HOSTS, "--gpu", "none", "--from_run", "logs", "train.py")
    assert "speeds: measured on " in out
    assert "right within about 50 %:" in out
    assert f"kept in {kept}: later plans of jobs on these hosts are corrected by it" in out
    row = next(line.split() for line in out.splitlines() if "a step  " in line)
    assert {row[3], row[5]} <= {"ms", "s"}, row
    assert float(row[6]) > 0

    again = json.loads(done(tmp_path, "plan", *HOSTS, "--speeds", str(kept), "--json", "train.py"))
    assert again["speeds"]["tolerance"] == 0.25
    assert again["speeds"]["factors"]["compute"] > 0
    (parts,) = again["step_seconds"]
    assert all(one["low"] == one["high"] for one in parts.values())
    assert parts["compute"]["low"] > 0

    kept.write_text("{}")
    job = Job(tmp_path, ["plan", *HOSTS, "--gpu", "none", "train.py"], env=own_state(tmp_path))
    assert job.wait(LIMIT_S) == 2
    assert job.err.startswith(f"dslaunch: {kept}: is no file of measured speeds; measure the hosts anew")

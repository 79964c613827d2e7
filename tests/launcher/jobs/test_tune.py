"""`dslaunch plan --tune` and `dslaunch --autotuning`: configurations that run for real, on CPUs."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.launcher.local_job import Job, poll

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TUNED_S = 400.0  # four rehearsals and up to five jobs import torch, on a machine that may be busy
ENDED_S = 100.0

# A trial fails at the stage that FAILS names, and stands still at the one that WAITS names.
TRAIN = """
import argparse, os, time
import torch
import deepspeed
from torch import nn
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument('--local_rank', type=int)
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
data = [(torch.randn(8), torch.randn(4)) for _ in range(4096)]
engine, _, loader, _ = deepspeed.initialize(args=args, model=model, training_data=data)
stage = str(engine.zero_optimization_stage())
is_real = 'DSLAUNCH_TRIAL' in os.environ
if is_real and stage == os.environ.get('FAILS'):
    raise RuntimeError('no room for this stage')
for number, (x, y) in enumerate(loader):
    engine.backward((engine(x) - y).square().mean())
    engine.step()
    if is_real and stage == os.environ.get('WAITS'):
        print('stands still', flush=True)
        time.sleep(1000)
    if number == 3:
        engine.save_checkpoint('saved')
    if engine.global_rank == 0:
        open('steps', 'a').write(stage)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
}
PROGRAM = ("train.py", "--deepspeed", "--deepspeed_config", "ds.json")
OPTIONS = ("--num_gpus=2", "--preload=torch", "--drop_in=always")
STAGES = [f"stage {stage}, micro batch 4 x 1" for stage in (1, 2, 3)]


def files(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()} - {"home", "stdout", "stderr"}


def test_configurations_run_for_real_until_an_interruption_and_leave_no_process_and_no_file(
    tmp_path: Path,
) -> None:
    """The first is measured, the second fails and is out, and the third is interrupted. run/test_tune_job.py
    goes on from there.
    """
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    words = ["plan", "--gpu=none", "--host_memory=64GB", "--tune", "--tune_steps=3", "--out=best.json"]
    job = Job(
        tmp_path,
        [*words, *OPTIONS, *PROGRAM],
        env={"XDG_STATE_HOME": str(tmp_path / "home"), "FAILS": "2", "WAITS": "3"},
    )
    trials = tmp_path / "home" / "dslaunch" / "tuning"
    poll(
        lambda: any("stands still" in one.read_text() for one in trials.glob("*/output*.txt")),
        lambda: f"a trial that waits in\n{job.err}",
        TUNED_S,
    )
    job.signal(signal.SIGINT)
    assert job.wait(ENDED_S) == 130, job.err
    for stage in STAGES:
        assert f"tune: round 1, {stage}: 2 + 3 steps on 2 ranks" in job.err
    assert "tune: out: rank " in job.err
    assert "RuntimeError: no room for this stage; its output is in " in job.err
    assert "interrupted in a trial; " in job.err
    job.assert_nothing_is_left()
    assert files(tmp_path) == {"train.py", "ds.json"}  # what trials wrote is gone with them
    (state,) = trials.glob("*/tuning.json")
    first, second = json.loads(state.read_text())["ended"]
    assert (first["name"], second["name"]) == (STAGES[0], STAGES[1])
    assert (first["outcome"]["num_steps"], first["outcome"]["num_samples"]) == (3, 8)
    assert first["outcome"]["step_s"] > 0 == second["outcome"]["num_steps"]


@pytest.mark.exhaustive
def test_autotuning_runs_the_job_with_the_fastest(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("enumerate(loader)", "enumerate(list(loader)[:9])"))
    section = {"enabled": True, "start_profile_step": 1, "end_profile_step": 3, "tuner_num_trials": 2}
    (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, "autotuning": section}))
    job = Job(tmp_path, ["--autotuning=run", *OPTIONS, *PROGRAM])
    assert job.wait(TUNED_S) == 0, job.err
    best = json.loads((tmp_path / "autotuning_results" / "ds_config_optimal.json").read_text())
    assert "autotuning" not in best
    assert (tmp_path / "steps").read_text() == str(best["zero_optimization"]["stage"]) * 9
    assert (tmp_path / "saved").is_dir()
    job.assert_nothing_is_left()

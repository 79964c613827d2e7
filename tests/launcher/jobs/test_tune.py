"""`dslaunch plan --tune` and `dslaunch --autotuning`: configurations that run for real, on CPUs."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.launcher.local_job import Job, poll

pytestmark = pytest.mark.slow

TUNED_S = 300.0  # four rehearsals and up to five jobs import torch, on a machine that may be busy

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


def test_an_interrupted_tuning_goes_on_and_a_configuration_that_fails_is_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    words = ["plan", "--gpu=none", "--host_memory=64GB", "--tune", "--tune_steps=3", "--out=best.json"]
    words += [*OPTIONS, *PROGRAM]
    state = {"XDG_STATE_HOME": str(tmp_path / "home")}
    first = Job(tmp_path, words, env={"WAITS": "2", **state})
    trials = tmp_path / "home" / "dslaunch" / "tuning"
    poll(
        lambda: any("stands still" in one.read_text() for one in trials.glob("*/output*.txt")),
        lambda: f"a trial that waits in\n{first.err}",
        TUNED_S,
    )
    assert f"tune: round 1, {STAGES[1]}: 2 + 3 steps on 2 ranks" in first.err
    first.signal(signal.SIGINT)
    assert first.wait(TUNED_S) == 130, first.err
    assert "interrupted in a trial; " in first.err
    first.assert_nothing_is_left()
    assert files(tmp_path) == {"train.py", "ds.json"}

    second = Job(tmp_path, words, env={"FAILS": "3", **state})
    assert second.wait(TUNED_S) == 0, second.err
    assert "tune: 1 trial ended before, and " in second.err
    assert f"round 1, {STAGES[0]}" not in second.err
    assert "tune: out: rank " in second.err
    assert "RuntimeError: no room for this stage; its output is in " in second.err
    *_, title, head, fastest, slower, failed = second.out.splitlines()
    assert title.startswith("tuned: stage "), second.out
    assert head.split() == ["predicted", "a", "step", "samples/s", "steps", "why"]
    assert sorted(one.strip()[:26] for one in (fastest, slower)) == STAGES[:2]
    assert failed.strip().startswith(f"{STAGES[2]}  -")
    best = json.loads((tmp_path / "best.json").read_text())
    assert title.startswith(
        f"tuned: stage {best['zero_optimization']['stage']}, micro batch 4 x 1, the fastest of 3"
    )
    assert best["train_micro_batch_size_per_gpu"] == 4
    second.assert_nothing_is_left()
    assert files(tmp_path) == {"train.py", "ds.json", "best.json"}  # what trials wrote is gone with them


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

"""`dslaunch numerics`: a job that is run twice, and what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslaunch.launcher.command_line.numerics import PLAIN, STAGE_0, _reference
from tests.lab import Lab
from tests.launcher.command import Command
from tests.launcher.local_job import Job, assert_short

pytestmark = pytest.mark.slow

TWO_RUNS_S = 150.0  # torch is imported in both, on a machine that may be busy

# With the argument `wrong` the gradients of one layer count twice.
TRAIN = """
import sys
import torch
import deepspeed
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 4))
config = {'train_micro_batch_size_per_gpu': 4, 'gradient_accumulation_steps': 2, 'gradient_clipping': 1.0}
config['zero_optimization'] = {'stage': 2}
config['optimizer'] = {'type': 'SGD', 'params': {'lr': 0.1}}
data = [(torch.randn(8), torch.randn(4)) for _ in range(256)]
engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=data)
if 'wrong' in sys.argv and type(engine).__name__ == 'RecordedEngine':
    model[3].weight.register_hook(lambda grad: 2 * grad)
for number, (x, y) in enumerate(loader):
    engine.backward((engine(x) - y).square().mean())
    engine.step()
    print('micro batch', number, flush=True)
"""


def _run(tmp_path: Path, *arguments: str) -> Job:
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["numerics", "--num_gpus=2", "--steps=2", "--preload=torch", "--drop_in=always", "train.py"]
    return Job(tmp_path, [*words, *arguments])


def test_a_program_is_run_twice_and_found_equal(tmp_path: Path) -> None:
    job = _run(tmp_path)
    assert job.wait(TWO_RUNS_S) == 0, job.err
    said = [line.removeprefix("dslaunch: ") for line in job.err.splitlines()]
    assert "numerics: run 1 of 2, as configured" in said
    assert "numerics: run 2 of 2, by torch alone" in said
    assert job.out.count("micro batch 2") == 4  # each of two ranks ends in the last of four micro batches
    assert "micro batch 3" not in job.out
    *_, dropout, _, verdict = job.out.splitlines()
    assert dropout == "dropout: it is off in both runs (p was 0.1), since no two runs drop the same elements"
    assert verdict == "equal: 2 steps of 4 parameters at stage 2, as configured and in plain torch"
    assert {one.name for one in tmp_path.iterdir()} == {"train.py", "home", "stdout", "stderr"}
    assert_short(job)
    job.assert_nothing_is_left()


@pytest.mark.exhaustive
def test_a_difference_is_the_exit_code_and_named(tmp_path: Path) -> None:
    job = _run(tmp_path, "wrong")
    assert job.wait(TWO_RUNS_S) == 1, job.err
    *_, hint, verdict = job.out.splitlines()
    assert hint == "the whole gradient is 2 times that of the other"
    assert verdict == "differs: step 1: gradient of '3.weight'"


@pytest.mark.parametrize(("code", "told"), [(7, 7), (1, 2)])
def test_a_run_that_fails_gives_its_exit_code_which_is_not_that_of_a_difference(
    tmp_path: Path, code: int, told: int
) -> None:
    (tmp_path / "train.py").write_text(f"import sys; sys.exit({code})")
    job = Job(tmp_path, ["numerics", "--num_gpus=1", "train.py"])
    assert job.wait() == told
    assert "run 2 of 2" not in job.err


def test_a_folder_is_left_only_with_numbers_in_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "there").mkdir()
    for folder in ("new", "there"):
        job = Job(tmp_path, ["numerics", f"--keep={folder}", "--hostfile=nosuch", "train.py"])
        assert job.wait() == 2
        assert "nosuch" in job.err
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "there").exists()


def test_a_program_without_an_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')")
    job = Job(tmp_path, ["numerics", "--num_gpus=1", "train.py"])
    assert job.wait() == 2
    assert "this machine sees no step of its engine" in job.err


@pytest.mark.parametrize(("free", "reference"), [(100, PLAIN), (99, STAGE_0)])
def test_stage_0_is_the_reference_where_the_whole_model_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], free: int, reference: str
) -> None:
    place = tmp_path / "configured" / "engine0"
    place.mkdir(parents=True)
    facts = {"plain_bytes": 100 << 30, "free_bytes": free << 30}
    (place / "step0.rank0.json").write_text(json.dumps({"tensors": {}, "notes": facts}))
    assert _reference("auto", tmp_path) == reference
    assert _reference(PLAIN, tmp_path) == PLAIN
    said = "the whole model in each rank needs 100.0 GiB, and 99.0 GiB are free"
    assert (said in capsys.readouterr().err) == (reference == STAGE_0)


HOSTS = ("-H", "hosts", "--num_nodes=2", "--steps=2", "--preload=torch", "--drop_in=always")


@pytest.mark.exhaustive
def test_hosts_that_share_a_folder_are_compared(lab: Lab, folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    command = Command(lab.head, folder, "numerics", *HOSTS, "train.py")
    assert command.wait(TWO_RUNS_S) == 0, command.err
    assert command.out.splitlines()[-1].startswith("equal: 2 steps of 4 parameters at stage 2")
    assert not list(folder.glob(".dslaunch-numerics-*"))


@pytest.mark.exhaustive
def test_a_host_that_keeps_its_numbers_to_itself_is_found(lab: Lab, folder: Path) -> None:
    """Each host of the lab has a home folder of its own."""
    (folder / "train.py").write_text(TRAIN)
    command = Command(lab.head, folder, "numerics", *HOSTS, "--keep=~/numbers", "train.py")
    assert command.wait(TWO_RUNS_S) == 2, command.err
    assert "--keep=DIR with a folder that all" in " ".join(command.err.split())

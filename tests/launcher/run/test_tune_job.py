"""`dslaunch plan --tune` goes on where an earlier call was interrupted. Rehearsals and trials are answered at
once; jobs/test_tune.py has real ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.fit.tuning import Outcome
from dslaunch.launcher.run import tune_job
from dslaunch.launcher.run.trial import TrialInterrupted, TrialJob
from tests.launcher.run.planned_at_once import answer_at_once

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
}
WORDS = ("--num_gpus=2", "--gpu=none", "--host_memory=64GB", "--tune", "--tune_steps=3", "--out=best.json")
PROGRAM = ("train.py", "--deepspeed_config", "ds.json")
FAILED = Outcome(why_out="rank 1: RuntimeError: no room")


def measured(step_s: float) -> Outcome:
    return Outcome(step_s=step_s, num_samples=16, num_steps=3)


class Trials:
    """Trials of each stage: how they end, and which have run."""

    def __init__(self, outcomes: dict[int, Outcome | TrialInterrupted]) -> None:
        self.outcomes, self.ran = outcomes, list[tuple[int, int, int]]()

    def run(self, options: Any, plan: Any, trial: TrialJob, output: Any) -> Outcome:
        """Stand in for run_trial()."""
        stage = trial.config["zero_optimization"]["stage"]
        assert json.loads(trial.config_file.read_text()) == trial.config
        self.ran.append((stage, trial.warm_up, trial.num_steps))
        outcome = self.outcomes[stage]
        if isinstance(outcome, TrialInterrupted):
            raise outcome
        return outcome


Tuned = Callable[[dict[int, Any]], tuple[int, str, str, list[tuple[int, int, int]]]]


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tuned:
    """The command, given how the trials of each stage end: exit code, stdout, stderr, and what ran."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    answer_at_once(monkeypatch.setattr)
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))

    def tune(outcomes: dict[int, Any]) -> tuple[int, str, str, list[tuple[int, int, int]]]:
        trials = Trials(outcomes)
        monkeypatch.setattr(tune_job, "run_trial", trials.run)
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", *WORDS, *PROGRAM])
        assert isinstance(ended.value.code, int)
        return (ended.value.code, *capsys.readouterr(), trials.ran)

    return tune


def test_the_same_command_goes_on_after_the_trials_that_have_ended(tuned: Tuned, tmp_path: Path) -> None:
    code, _, err, ran = tuned({1: measured(0.2), 2: TrialInterrupted(130)})
    assert (code, ran) == (130, [(1, 2, 3), (2, 2, 3)]), err
    assert "interrupted in a trial; " in err
    assert not (tmp_path / "best.json").exists()

    code, out, err, ran = tuned({2: measured(0.1), 3: FAILED})
    assert (code, ran) == (0, [(2, 2, 3), (3, 2, 3)]), err
    assert "tune: 1 trial ended before, and " in err
    assert f"tune: out: {FAILED.why_out}; its output is in " in err
    *_, title, _, fastest, slower, failed = out.splitlines()
    assert title.startswith("tuned: stage 2, micro batch 4 x 1, the fastest of 3"), out
    rows = [line.split(",")[0].strip() for line in (fastest, slower, failed)]
    assert rows == ["stage 2", "stage 1", "stage 3"]
    best = json.loads((tmp_path / "best.json").read_text())
    assert (best["zero_optimization"]["stage"], best["train_micro_batch_size_per_gpu"]) == (2, 4)

    (tmp_path / "best.json").unlink()
    again = tuned({})
    assert (again[0], again[1], again[3]) == (0, out, [])  # all is known

"""The measurement of a trial: which steps count, and when the program ends."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dslaunch.runtime.environment import TrialRun, read_trial
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.metrics import trial as module
from dslaunch.runtime.metrics.trial import StepTrial

CPU = torch.device("cpu")


class _Pipe:
    is_ours = True

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def tell_file(self, name: str, text: str) -> None:
        assert name == "trial"
        self.told.append(json.loads(text))

    def wait_until_told(self, timeout_s: float) -> bool:
        return True


def _progress() -> Any:
    return SimpleNamespace(skipped_steps=0, global_samples=100)


def test_steps_behind_the_warm_up_are_measured_and_then_the_program_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 11.0, 13.0, 14.0, 17.0, 22.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    pipe, ended = _Pipe(), list[bool]()
    made: Any = pipe
    trial = StepTrial(TrialRun(warm_up=2, steps=3, kept_files=""), made, end=lambda: ended.append(True))
    trial.note_inputs(({"x": torch.zeros(4, 7)},))
    progress, other = _progress(), _progress()
    for is_skipped in (False, False, False, True, False, False):
        assert not ended
        progress.global_samples += 8
        progress.skipped_steps += is_skipped
        trial.end_step(progress, CPU)
        trial.end_step(other, CPU)  # another engine's
    assert ended == [True]
    # the steps 3, 5 and 6: two are the warm-up, and the fourth was skipped
    assert pipe.told == [
        {"steps_s": [2.0, 3.0, 5.0], "samples": 8, "num_steps": 6, "rows": 4, "kept_files": ""}
    ]


def test_a_program_that_ends_before_tells_what_was_measured() -> None:
    pipe: Any = _Pipe()
    trial = StepTrial(TrialRun(warm_up=1, steps=3, kept_files="no overlay"), pipe, end=lambda: None)
    progress = _progress()
    for _ in range(2):
        trial.end_step(progress, CPU)
    trial._tell()
    trial._tell()
    (told,) = pipe.told
    assert (len(told["steps_s"]), told["num_steps"], told["kept_files"]) == (1, 2, "no overlay")


def test_the_variable_names_two_numbers_of_steps() -> None:
    assert read_trial({}) is None
    found = read_trial({"DSLAUNCH_TRIAL": "2:5", "DSLAUNCH_KEPT_FILES": "no"})
    assert found == TrialRun(warm_up=2, steps=5, kept_files="no")
    for text in ("2", "2:0", "a:5", "2:5:1"):
        with pytest.raises(ConfigError, match="must be two numbers of steps"):
            read_trial({"DSLAUNCH_TRIAL": text})

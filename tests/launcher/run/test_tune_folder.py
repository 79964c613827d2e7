"""The folder of a tuning: what it holds of another job or form is not taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.launcher.fit.tuning import Outcome, TrialPlace
from dslaunch.launcher.run.tune_folder import TuneFolder

PLACE, OUTCOME = TrialPlace("stage 2", 0), Outcome(step_s=0.5, num_samples=8, num_steps=5)


def test_outcomes_are_read_again(tmp_path: Path) -> None:
    TuneFolder(tmp_path, "key").add(PLACE, OUTCOME)
    assert TuneFolder(tmp_path, "key").known == {PLACE: OUTCOME}
    other = TuneFolder(tmp_path, "another key")
    assert (other.known, other.is_of_another) == ({}, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"key": "key", "version": 1}',
        '{"key": "key", "version": 1, "ended": [{"name": "stage 2"}]}',
        '{"key": "key", "version": 1, "ended": [{"name": "a", "round": 0, "outcome": {"seconds": 1}}]}',
    ],
)
def test_a_file_of_another_form_counts_as_of_another_job(text: str, tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text(text)
    folder = TuneFolder(tmp_path, "key")
    assert (folder.known, folder.is_of_another) == ({}, True)

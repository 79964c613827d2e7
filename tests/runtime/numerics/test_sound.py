"""In sound trainings of every kind `dslaunch numerics` finds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.exhaustive import few
from tests.runtime.numerics.runs import compared
from tests.runtime.numerics.trainings import SGD, SOUND, resumed, saved
from tests.runtime.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


@pytest.mark.parametrize("name", few(SOUND, lambda name: name in ("pp", "sp", "edits")))
def test_nothing_is_found_in_a_sound_training(ranks: Ranks, tmp_path: Path, name: str) -> None:
    size, training, arguments = SOUND[name]
    result = compared(ranks, training, *arguments, folder=tmp_path, size=size)
    assert result.difference is None
    assert result.num_steps > 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", [{"stage": 3}, {"stage": 1, "optimizer": SGD}])
def test_a_training_goes_on_from_a_checkpoint_in_both_runs(
    ranks: Ranks, tmp_path: Path, changes: dict[str, Any]
) -> None:
    ranks(saved, str(tmp_path / "saved"), changes, world_size=2)
    result = compared(ranks, resumed, str(tmp_path / "saved"), changes, folder=tmp_path / "numbers")
    assert result.difference is None
    assert result.num_steps == 3

"""In sound trainings of every kind `dslaunch numerics` finds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exhaustive import few
from tests.runtime.numerics.runs import compared
from tests.runtime.numerics.trainings import SOUND
from tests.runtime.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


@pytest.mark.parametrize("name", few(SOUND, lambda name: name in ("pp", "sp")))
def test_nothing_is_found_in_a_sound_training(ranks: Ranks, tmp_path: Path, name: str) -> None:
    size, training, arguments = SOUND[name]
    result = compared(ranks, training, *arguments, folder=tmp_path, size=size)
    assert result.difference is None
    assert result.num_steps > 1

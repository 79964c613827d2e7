"""Planted faults are found, in the step, quantity and parameter that they break."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exhaustive import few
from tests.runtime.numerics.faults import FAULTS
from tests.runtime.numerics.runs import compared
from tests.runtime.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

KEPT = ("dropped gradient", "frozen part", "stale parameter", "norm without a stage")


def _faulty(rank: int, name: str) -> None:
    fault = FAULTS[name]
    with fault.plant():
        fault.training(rank, *fault.arguments)


@pytest.mark.parametrize("name", few(FAULTS, lambda name: name in KEPT))
def test_a_planted_fault_is_found(ranks: Ranks, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    found = compared(ranks, _faulty, name, folder=tmp_path, size=fault.size).difference
    assert found is not None
    assert (found.step, found.quantity, found.name) == fault.found
    if fault.hint:
        assert found.hint == fault.hint

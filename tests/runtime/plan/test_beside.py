"""Predicted memory and bytes on the wire beside those of the same steps on the fake device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.runtime.plan.beside import Row, Seen, measure, predict
from tests.runtime.plan.rows import FEW, ROWS

if TYPE_CHECKING:
    from tests.fake_cuda.ranks import Parent

TOLERANCE = 0.03


def measured(device: Parent, row: Row) -> Seen:
    from tests.runtime.ranks import Ranks

    ranks = Ranks(device.fork)
    try:
        seen: Seen = ranks(measure, row, world_size=row.world_size)[row.rank]
    finally:
        ranks.stop()
    return seen


def assert_alike(planned: Seen, real: Seen) -> None:
    assert planned.problem == ""
    assert planned.peaks == pytest.approx(real.peaks, rel=TOLERANCE)
    assert planned.pinned == pytest.approx(real.pinned, rel=TOLERANCE, abs=4096)
    assert planned.sent == real.sent


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("row", [row for row in ROWS if row.name in FEW], ids=lambda row: row.name)
def test_a_plan_says_what_a_run_needs(device: Parent, row: Row) -> None:
    assert_alike(predict(row), measured(device, row))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("row", [row for row in ROWS if row.name not in FEW], ids=lambda row: row.name)
def test_a_plan_says_what_a_run_needs_in_every_layout(device: Parent, row: Row) -> None:
    assert_alike(predict(row), measured(device, row))

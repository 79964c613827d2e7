"""Views of parts of a layer's output: which of them mix positions up."""

from __future__ import annotations

import pytest

from dslaunch.runtime.tensor.views import mixes_positions

SIZE = 32  # of a whole output; each of two ranks has 16 of it


@pytest.mark.parametrize(
    ("given", "made", "is_mixed"),
    [
        ((2, 8, 16), (2, 8, 2, 8), False),  # this rank's 2 heads
        ((2, 8, 16), (2, 4, 4, 8), True),  # all 4 heads of half of the positions
        ((2, 8, 16), (8, 4, 8), True),
        ((2, 8, 16), (2, 4, 2, 16), True),  # 2 heads of which each rank has 1
        ((2, 8, 16), (2, 4, 32), True),
        ((2, 8, 16), (16, 2, 8), False),
        ((2, 8, 16), (16, 16), False),
        ((2, 8, 16), (2, 128), False),
        ((2, 8, 16), (256,), False),
        ((2, 8, 16), (2, 2, 4, 16), False),  # 2 windows of 4 positions
        ((2, 8, 16), (2, 2, 4, 2, 8), False),
        ((16, 16), (2, 8, 2, 8), False),
        ((16, 16), (8, 2, 16), False),
        ((16, 16), (8, 4, 8), True),
        ((0, 8, 16), (0, 4, 4, 8), False),
    ],
)
def test_a_view_keeps_the_positions_of_a_part(
    given: tuple[int, ...], made: tuple[int, ...], is_mixed: bool
) -> None:
    assert mixes_positions(given, made, size=SIZE) is is_mixed

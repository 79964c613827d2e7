"""Where values differ from what is known of them."""

from __future__ import annotations

import pytest
import torch

from dslaunch.runtime.zero.parameters import writes
from dslaunch.runtime.zero.parameters.writes import first_difference

NAN = float("nan")


@pytest.mark.parametrize("piece", [1, 3, 4, 100])
@pytest.mark.parametrize(
    ("new", "known", "expected"),
    [
        ([], [], None),
        ([1, 2, 3, 4], [1, 2, 3, 4], None),
        ([1, 2, 3, 4], [0, 2, 3, 0], 0),
        ([1, 2, 3, 4], [1, 2, 3, 0], 3),
        ([1, NAN, 3, NAN], [1, NAN, 3, NAN], None),
        ([1, NAN, 3, NAN], [1, NAN, 3, 4], 3),
        ([1, 2, NAN, 4], [1, 2, NAN, 5], 3),
        ([1, 2, 3, 4], [1, 2 + 1e-4, 3, 4], None),  # the same in bfloat16
    ],
)
def test_the_first_difference_is_found_in_any_piece(
    monkeypatch: pytest.MonkeyPatch,
    piece: int,
    new: list[float],
    known: list[float],
    expected: int | None,
) -> None:
    """Of parameters and their masters, which are compared in the dtype of the former."""
    monkeypatch.setattr(writes, "PIECE_NUMEL", piece)
    assert first_difference(torch.tensor(new, dtype=torch.bfloat16), torch.tensor(known)) == expected

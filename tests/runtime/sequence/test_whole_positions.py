"""Which tokens of whole sequences may see which, as their positions say."""

from __future__ import annotations

import pytest
import torch

from dslaunch.runtime.sequence.whole_positions import HIDDEN, WholePositions

PACKED = [0, 1, 2, 0, 1, 0]  # three documents
NUMBERS = [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("hidden", [(), (1,), (0, 1)])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_token_sees_its_document_before_it_and_itself(
    is_causal: bool, window: int | None, hidden: tuple[int, ...]
) -> None:
    positions = [HIDDEN - one if place in hidden else one for place, one in enumerate(PACKED)]
    whole = WholePositions(torch.tensor([positions]))
    mask = whole.mask(is_causal=is_causal, window=window)
    assert mask is not None
    assert whole.mask(is_causal=is_causal, window=window) is mask  # of all layers
    assert mask.shape == (1, 1, 6, 6)
    for query in range(6):
        for key in range(6):
            same = NUMBERS[query] == NUMBERS[key]
            is_near = (not is_causal or key <= query) and (window is None or query - key < window)
            assert bool(mask[0, 0, query, key]) == (
                query == key or (same and is_near and key not in hidden)
            ), (query, key)
    assert whole.places.tolist() == [PACKED]
    assert whole.seen.tolist() == [[place not in hidden for place in range(6)]]


def test_one_document_needs_no_mask() -> None:
    whole = WholePositions(torch.arange(6)[None])
    assert whole.mask(is_causal=True, window=None) is None
    assert whole.mask(is_causal=True, window=6) is None
    assert whole.mask(is_causal=True, window=5) is not None
    assert not whole.has_hidden


@pytest.mark.parametrize(
    ("positions", "hidden", "documents"),
    [
        ([5, 6, 7, 0, 1, 2], (2,), [0, 0, 0, 1, 1, 1]),  # another document after the padding
        ([5, 6, 7, 7, 8, 9], (2,), [0, 0, 0, 0, 0, 0]),  # the same one, which does not count it
        ([5, 6, 7, 8, 9, 10], (2,), [0, 0, 0, 0, 0, 0]),  # nor does this one mind
        ([9, 9, 0, 1, 0, 1], (0, 1), [0, 0, 0, 0, 1, 1]),  # at the front
        ([8, 9, 0, 1, 1, 2], (3,), [0, 0, 1, 1, 1, 1]),  # of the document that is there
    ],
)
def test_padding_ends_a_document_only_where_another_one_begins(
    positions: list[int], hidden: tuple[int, ...], documents: list[int]
) -> None:
    given = [HIDDEN - one if place in hidden else one for place, one in enumerate(positions)]
    mask = WholePositions(torch.tensor([given])).mask(is_causal=True, window=None)
    assert mask is not None
    for query in set(range(6)) - set(hidden):
        sees = [key for key in range(6) if mask[0, 0, query, key]]
        assert sees == [
            key for key in range(query + 1) if documents[key] == documents[query] and key not in hidden
        ]

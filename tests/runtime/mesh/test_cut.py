"""Cuts: what torch's placements give, and boxes that are the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dslaunch.runtime.checkpoint.files.tensor_runs import TensorRun
from dslaunch.runtime.mesh.cut import Cut, Piece, are_whole, cut_evenly

SHAPES = st.lists(st.sampled_from((1, 2, 3, 4, 6, 8)), min_size=1, max_size=3).map(tuple)


@given(shape=SHAPES, size=st.integers(1, 4), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_part_is_what_torch_gives_this_rank(shape: tuple[int, ...], size: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    expected = [*torch.chunk(whole, size, dim=dim)]  # which gives fewer where there is not enough for all
    cuts = [cut_evenly(shape, dim - len(shape), index=index, size=size) for index in range(size)]
    assert are_whole(cuts)
    for index, cut in enumerate(cuts):
        part = cut.take(whole)
        assert tuple(part.shape) == cut.part_shape
        assert torch.equal(part, expected[index] if index < len(expected) else whole.narrow(dim, 0, 0))


@given(shape=SHAPES, sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_boxes_of_all_ranks_runs_are_the_whole(
    shape: tuple[int, ...], sizes: tuple[int, int], data: st.DataObject
) -> None:
    """Parts of a tensor, each in a flat buffer that is cut over ranks again, at odd places."""
    tp, dp = sizes
    dim = data.draw(st.integers(0, len(shape) - 1))
    packs = data.draw(st.sampled_from([[shape[dim]], [shape[dim] // 2, shape[dim] - shape[dim] // 2]]))
    packs = [pack for pack in packs if pack] or [shape[dim]]
    whole = torch.randn(shape)
    saved = torch.full(shape, float("nan"))
    for index in range(tp):
        cut = cut_evenly(shape, dim, index=index, size=tp, packs=packs)
        flat = cut.take(whole).reshape(-1)
        step = -(-(flat.numel() + 3) // dp)
        for start in range(0, flat.numel(), step):
            numel = min(step, flat.numel() - start)
            run = TensorRun(name="w", shape=shape, start=start, numel=numel, flat="", offset=start, cut=cut)
            for box in run.boxes(max_numel=data.draw(st.sampled_from((1, 5, 1000)))):
                where = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                assert box.numel == saved[where].numel()
                assert saved[where].isnan().all()  # each element once
                saved[where] = box.of(flat)
    assert torch.equal(saved, whole)


def test_parts_that_overlap_or_leave_something_out_are_no_whole() -> None:
    whole = [Cut((4,), 0, (Piece(0, 0, 2),)), Cut((4,), 0, (Piece(2, 0, 2),))]
    assert are_whole(whole)
    assert not are_whole([whole[0], whole[0]])
    assert not are_whole(whole[:1])
    assert not are_whole([whole[0], Cut((4,), 0, (Piece(3, 0, 1),))])
    assert not are_whole([whole[0], Cut((5,), 0, (Piece(2, 0, 3),))])


def test_packs_that_are_not_the_whole_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\] along dimension 0 are not the whole"):
        cut_evenly((4, 2), 0, index=0, size=2, packs=[2, 3])

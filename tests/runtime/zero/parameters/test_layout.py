"""The layout of flat buffers, as arithmetic."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, strategies as st

from dslaunch.runtime.zero.parameters.layout import SHARD_BYTES, SLOT_BYTES, Segment, plan_layout

SHAPES = [(7, 15), (15,), (15, 17), (17,), (), (0, 3)]


def test_parameters_follow_each_other_with_16_byte_starts() -> None:
    layout = plan_layout(SHAPES, groups=[0] * 6, num_shards=2, itemsize=4)
    assert [slot.offset for slot in layout.slots] == [0, 108, 124, 380, 400, 404]
    assert [slot.numel for slot in layout.slots] == [105, 15, 255, 17, 1, 0]
    assert layout.numel == 512
    assert [layout.shard_range(index) for index in range(2)] == [(0, 256), (256, 512)]


def test_groups_are_contiguous_and_slots_keep_the_callers_order() -> None:
    layout = plan_layout([(8,), (4,), (8,), (4,)], groups=[0, 1, 0, 1], num_shards=1, itemsize=4)
    assert [slot.offset for slot in layout.slots] == [0, 16, 8, 20]
    assert layout.segments(0) == (Segment(group=0, offset=0, numel=16), Segment(group=1, offset=16, numel=8))


def test_a_shard_has_the_part_of_each_group_that_lies_in_it() -> None:
    layout = plan_layout([(100,), (28,)], groups=[0, 1], num_shards=2, itemsize=4)
    assert layout.shard_range(1) == (64, 128)
    assert layout.segments(0) == (Segment(group=0, offset=0, numel=64),)
    assert layout.segments(1) == (Segment(group=0, offset=0, numel=36), Segment(group=1, offset=36, numel=28))


def test_shards_may_be_joined_for_a_smaller_shard_axis() -> None:
    layout = plan_layout([(200,)], groups=[0], num_shards=4, itemsize=4)
    assert layout.numel == 256
    assert layout.shard_range(1, num_shards=2) == (128, 256)
    assert layout.shard_range(0, num_shards=1) == (0, 256)
    with pytest.raises(AssertionError, match="shard 0 of 3 does not exist in a layout of 4"):
        layout.shard_range(0, num_shards=3)


def test_an_empty_layout_has_nothing() -> None:
    layout = plan_layout([], groups=[], num_shards=3, itemsize=4)
    assert (layout.numel, layout.segments(2)) == (0, ())


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=12),
    num_shards=st.integers(1, 8),
    itemsize=st.sampled_from([2, 4]),
    data=st.data(),
)
def test_every_element_lies_in_exactly_one_shard_and_one_segment(
    shapes: list[tuple[int, ...]], num_shards: int, itemsize: int, data: st.DataObject
) -> None:
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(shapes), max_size=len(shapes)))
    layout = plan_layout(shapes, groups=groups, num_shards=num_shards, itemsize=itemsize)
    owner: dict[int, int] = {}  # element -> its parameter
    for index, slot in enumerate(layout.slots):
        assert (slot.numel, slot.shape, slot.group) == (prod(shapes[index]), shapes[index], groups[index])
        assert slot.offset * itemsize % SLOT_BYTES == 0
        for element in range(slot.offset, slot.offset + slot.numel):
            assert owner.setdefault(element, index) == index
    covered: dict[int, int] = {}  # element -> its group
    found: dict[int, list[int]] = {index: [] for index in range(len(shapes))}
    for shard in range(num_shards):
        start, stop = layout.shard_range(shard)
        assert (stop - start) * itemsize % SHARD_BYTES == 0
        for segment in layout.segments(shard):
            assert 0 <= segment.offset < segment.offset + segment.numel <= stop - start
            for element in range(start + segment.offset, start + segment.offset + segment.numel):
                assert covered.setdefault(element, segment.group) == segment.group
        for index, slot in enumerate(layout.slots):
            fragment = layout.fragment(slot, shard)
            if fragment is not None:
                assert start + fragment.offset_in_shard == slot.offset + fragment.offset_in_param
                found[index] += range(fragment.offset_in_param, fragment.offset_in_param + fragment.numel)
    for element, index in owner.items():
        assert covered[element] == groups[index]
    assert found == {index: list(range(prod(shape))) for index, shape in enumerate(shapes)}
    waste = layout.numel - sum(prod(shape) for shape in shapes)
    assert waste * itemsize < len(shapes) * SLOT_BYTES + num_shards * SHARD_BYTES


def test_gaps_are_what_no_slot_covers() -> None:
    layout = plan_layout([(3,), (4,), (5,)], groups=[1, 0, 0], num_shards=2, itemsize=4)
    covered = [0] * layout.numel
    for start, stop in (
        *layout.gaps(),
        *((slot.offset, slot.offset + slot.numel) for slot in layout.slots),
    ):
        for place in range(start, stop):
            covered[place] += 1
    assert covered == [1] * layout.numel
    assert layout.gaps() == ((9, 12), (15, layout.numel))

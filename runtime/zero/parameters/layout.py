"""Layout of parameters in a flat buffer, and the parts of it that a shard holds.

Arithmetic only: no tensors, no ranks.

Layout of a flat buffer
-----------------------
Parameters lie one after another, ordered by optimizer group (a stable sort, so definition order inside a
group). Each starts at a multiple of SLOT_BYTES, so that kernels meet no misaligned vector, and the whole is
padded so that it divides into `num_shards` equal shards of a multiple of SHARD_BYTES. A shard may cut a
parameter anywhere: the layout is element-flat. Optimizers that need whole rows or whole tensors want another
`plan_layout` that places the slots by rows; nothing below it would change, since all code asks for slots,
segments and fragments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

SLOT_BYTES = 16  # the widest load of a CPU or GPU lane that a misaligned start would split
SHARD_BYTES = 256  # the alignment of a CUDA allocation; a whole number of cache lines everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one parameter in the flat buffer."""

    offset: int
    numel: int
    shape: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of elements of one shard that belong to one optimizer group;
    `offset` counts from the shard's start.

    `missed` counts the optimizer steps that have left it alone.
    """

    group: int
    offset: int
    numel: int
    missed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """The part of one parameter that lies in one shard."""

    offset_in_shard: int
    offset_in_param: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """Slots in the order in which the parameters were given; `numel` includes the padding."""

    slots: tuple[Slot, ...]
    numel: int
    num_shards: int

    def shard_range(self, index: int, *, num_shards: int | None = None) -> tuple[int, int]:
        """Return [start, stop) of shard `index`; `num_shards` may be any divisor of the
        layout's own number.
        """
        count = self.num_shards if num_shards is None else num_shards
        if self.num_shards % count != 0 or not 0 <= index < count:
            raise AssertionError(f"shard {index} of {count} does not exist in a layout of {self.num_shards}")
        size = self.numel // count
        return index * size, (index + 1) * size

    def segments(self, index: int, *, num_shards: int | None = None) -> tuple[Segment, ...]:
        """Return the shard's runs of equal optimizer group; padding between two slots of a
        group belongs to it.
        """
        start, stop = self.shard_range(index, num_shards=num_shards)
        segments: list[Segment] = []
        for group, (first, last) in sorted(self._group_ranges().items()):
            low, high = max(first, start), min(last, stop)
            if low < high:
                segments.append(Segment(group=group, offset=low - start, numel=high - low))
        return tuple(segments)

    def segments_of(
        self, index: int, *, num_shards: int, frozen: frozenset[int], missed: Mapping[int, int]
    ) -> tuple[Segment, ...]:
        """Return `segments` without the slots at places in `frozen`, and apart those that have
        `missed` steps, by place.
        """
        start, _ = self.shard_range(index, num_shards=num_shards)
        apart = sorted({*frozen, *missed}, key=lambda index: self.slots[index].offset)
        segments: list[Segment] = []
        for segment in self.segments(index, num_shards=num_shards):
            here, end = segment.offset, segment.offset + segment.numel
            for index in apart:
                first = self.slots[index].offset - start
                low, high = max(first, here), min(first + self.slots[index].numel, end)
                if low >= high:
                    continue
                segments.append(replace(segment, offset=here, numel=low - here))
                if index not in frozen:
                    segments.append(replace(segment, offset=low, numel=high - low, missed=missed[index]))
                here = high
            segments.append(replace(segment, offset=here, numel=end - here))
        return tuple(segment for segment in segments if segment.numel)

    def cut_at_slots(
        self, segments: Sequence[Segment], index: int, *, num_shards: int
    ) -> Iterator[tuple[Segment, int, int]]:
        """Yield what the shard's segments have of each slot: the run, the slot's index, and the place in the
        slot of the run's first element.
        """
        start, _ = self.shard_range(index, num_shards=num_shards)
        for place, slot in enumerate(self.slots):
            for segment in segments:
                low = max(segment.offset + start, slot.offset)
                high = min(segment.offset + start + segment.numel, slot.offset + slot.numel)
                if low < high:
                    yield replace(segment, offset=low - start, numel=high - low), place, low - slot.offset

    def fragment(self, slot: Slot, index: int, *, num_shards: int | None = None) -> Fragment | None:
        """Return the part of `slot` that shard `index` holds, or None."""
        start, stop = self.shard_range(index, num_shards=num_shards)
        low, high = max(slot.offset, start), min(slot.offset + slot.numel, stop)
        if low >= high:
            return None
        return Fragment(offset_in_shard=low - start, offset_in_param=low - slot.offset, numel=high - low)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the [start, stop) of all padding, in order."""
        gaps, end = [], 0
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            gaps.append((end, slot.offset))
            end = slot.offset + slot.numel
        return tuple((start, stop) for start, stop in (*gaps, (end, self.numel)) if start < stop)

    def _group_ranges(self) -> dict[int, tuple[int, int]]:
        ranges: dict[int, tuple[int, int]] = {}
        for slot in self.slots:
            first, last = ranges.get(slot.group, (slot.offset, slot.offset))
            ranges[slot.group] = (min(first, slot.offset), max(last, slot.offset + slot.numel))
        return ranges


def plan_layout(
    shapes: Sequence[tuple[int, ...]],
    *,
    groups: Sequence[int],
    num_shards: int,
    itemsize: int,
    block_numel: int = 1,
) -> FlatLayout:
    """Place parameters of the given shapes and optimizer groups in one flat buffer.

    Units:  `itemsize` is bytes per element of the narrowest buffer that follows this layout; parameters and
            shards begin at multiples of `block_numel`, a power of two
    Errors: ValueError if the lengths differ
    """
    slot_numel = max(SLOT_BYTES // itemsize, block_numel)
    shard_numel = max(SHARD_BYTES // itemsize, block_numel)
    offsets: dict[int, int] = {}
    end = 0
    for index, (_, shape) in sorted(enumerate(zip(groups, shapes, strict=True)), key=lambda item: item[1][0]):
        offsets[index] = _round_up(end, slot_numel)
        end = offsets[index] + prod(shape)
    slots = tuple(
        Slot(offset=offsets[index], numel=prod(shape), shape=tuple(shape), group=groups[index])
        for index, shape in enumerate(shapes)
    )
    return FlatLayout(slots=slots, numel=_round_up(end, num_shards * shard_numel), num_shards=num_shards)


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple

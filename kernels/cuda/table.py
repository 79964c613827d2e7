"""The work of one launch: runs of elements, packed into the tables of `runs.cuh`.

Pure arithmetic on addresses.

A run has its elements one behind the other in every array, with the same coefficients: the part of a segment
that one piece of the gradient covers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .arrays import ITEM_BYTES

# Values of runs.cuh.
NUM_THREADS = 256
CHUNK_NUMEL = 8192
PACK_NUMEL = 8
UNALIGNED = 0xFFFF
_PACK_BYTES = 16
_HEADER = struct.Struct("<QII")
_RUN = struct.Struct("<5QqIHH")
_MAX_CHUNKS = 2**31  # limit of one table; block indices have 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize:
    """Capacity of one launch's parameters."""

    max_runs: int
    max_coefficients: int

    @property
    def macros(self) -> tuple[tuple[str, str], ...]:
        """Macros with which a kernel that takes such a table is compiled."""
        return (
            ("DSLAUNCH_MAX_RUNS", str(self.max_runs)),
            ("DSLAUNCH_MAX_COEFFICIENTS", str(self.max_coefficients)),
        )


SMALL = TableSize(max_runs=64, max_coefficients=8)
LARGE = TableSize(max_runs=512, max_coefficients=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Properties for which a kernel is compiled: the dtypes, None where there is no such array, and
    DSLAUNCH_MODE.
    """

    grad: str
    state: str | None = None
    param_out: str | None = None
    mode: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements to work on: the address of the first one in each array (0: no such array),
    and how many follow.
    """

    variant: Variant
    numel: int
    grad: int
    param: int = 0
    states: tuple[int, int] = (0, 0)
    param_out: int = 0
    coefficients: bytes = b""  # the kernel's Coefficients
    update: int = 0  # LAMB's direction; not in the table
    segment: int = 0  # index among all segments of the call; not in the table

    def addresses(self) -> tuple[tuple[int, int], ...]:
        """The address in each array that there is, and the bytes of one element."""
        arrays = [(self.grad, self.variant.grad), (self.param, "float32")]
        if self.variant.state is not None:
            arrays += [(state, self.variant.state) for state in self.states]
        arrays.append((self.param_out, self.variant.param_out or ""))
        return tuple((address, ITEM_BYTES[dtype]) for address, dtype in arrays if address)

    @property
    def head(self) -> int:
        """Number of elements before the first that is 16-byte aligned in every array;
        UNALIGNED if there is none.
        """
        arrays = self.addresses()
        for head in range(PACK_NUMEL):
            if all((address + head * item) % _PACK_BYTES == 0 for address, item in arrays):
                return min(head, self.numel)
        return UNALIGNED


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of a kernel: its by-value table, and the chunks that blocks may share."""

    variant: Variant
    size: TableSize
    table: bytes
    num_chunks: int
    runs: tuple[Run, ...]  # runs in the table


def plan_launches(
    runs: Iterable[Run],
    *,
    coefficient_bytes: int,
    sizes: Sequence[TableSize],
    factor: int = 0,
    may_skip_head: bool = True,
) -> tuple[Launch, ...]:
    """Put runs of the same variant into as few tables as can be; `sizes` are the tables there
    are, smallest first.

    `factor` is the address of a float32 on the device that is multiplied into every gradient (0: none).
    Without `may_skip_head` a run that is not aligned from its first element on counts as unaligned. Runs keep
    their order among those of their variant.
    """
    by_variant: dict[Variant, list[Run]] = {}
    for run in runs:
        if run.numel > 0:
            by_variant.setdefault(run.variant, []).append(run)
    launches = []
    for variant, same in by_variant.items():
        while same:
            size, num_runs = _fit(same, sizes)
            table, num_chunks, num_runs = _pack(
                same[:num_runs], size, coefficient_bytes, factor, may_skip_head
            )
            launches.append(
                Launch(
                    variant=variant,
                    size=size,
                    table=table,
                    num_chunks=num_chunks,
                    runs=tuple(same[:num_runs]),
                )
            )
            same = same[num_runs:]
    return tuple(launches)


def num_chunks_of(numel: int, head: int) -> int:
    """Return how many chunks a run makes: at least one, which takes the head with it."""
    behind = numel - (0 if head == UNALIGNED else head)
    return max(1, -(-behind // CHUNK_NUMEL))


def _fit(runs: Sequence[Run], sizes: Sequence[TableSize]) -> tuple[TableSize, int]:
    """Return the smallest table that takes all runs, else the largest, and how many it takes."""
    count = 0
    for size in sizes:
        seen: set[bytes] = set()
        count = 0
        for run in runs[: size.max_runs]:
            seen.add(run.coefficients)
            if len(seen) > size.max_coefficients:
                break
            count += 1
        if count == len(runs):
            return size, count
    return sizes[-1], count


def _pack(
    runs: Sequence[Run], size: TableSize, coefficient_bytes: int, factor: int, may_skip_head: bool
) -> tuple[bytes, int, int]:
    """Return the bytes of the table, its chunks, and how many of the runs are in it."""
    places: dict[bytes, int] = {}
    packed = bytearray()
    num_chunks = num_runs = 0
    for run in runs:
        head = run.head
        if head and not may_skip_head:
            head = UNALIGNED
        chunks = num_chunks_of(run.numel, head)
        if num_runs and num_chunks + chunks > _MAX_CHUNKS:
            break
        place = places.setdefault(run.coefficients, len(places))
        packed += _RUN.pack(
            run.param, run.grad, *run.states, run.param_out, run.numel, num_chunks, place, head
        )
        num_chunks += chunks
        num_runs += 1
    packed += bytes((size.max_runs - num_runs) * _RUN.size)
    packed += b"".join(places).ljust(size.max_coefficients * coefficient_bytes, b"\0")  # a run may have none
    return _HEADER.pack(factor, num_runs, num_chunks) + packed, num_chunks, num_runs

"""How work is cut into launches: read back from the bytes that a kernel gets."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from dslaunch.kernels.cuda.table import (
    CHUNK_NUMEL,
    LARGE,
    SMALL,
    UNALIGNED,
    Launch,
    Run,
    Variant,
    num_chunks_of,
    plan_launches,
)

FP32 = Variant(grad="float32", state="float32")
BF16 = Variant(grad="bfloat16", state="float32", param_out="bfloat16")
COEFFICIENT_BYTES = 8
PARAMETER_BYTES = {SMALL: 4096, LARGE: 32764}  # CUDA C++ Programming Guide, "__global__ Function Parameters"
MOST_COEFFICIENT_BYTES = 40  # Adam's


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One run as a kernel sees it."""

    param: int
    grad: int
    states: tuple[int, int]
    param_out: int
    numel: int
    first_chunk: int
    coefficients: bytes
    head: int


def read(launch: Launch) -> tuple[int, int, list[Read]]:
    """The factor, the number of chunks, and the runs; the layout is that of `Table` in runs.cuh."""
    factor, num_runs, num_chunks = struct.unpack_from("<QII", launch.table)
    at_coefficients = 16 + launch.size.max_runs * 56
    assert len(launch.table) == at_coefficients + launch.size.max_coefficients * COEFFICIENT_BYTES
    runs = []
    for place in range(num_runs):
        param, grad, state0, state1, out, numel, first, which, head = struct.unpack_from(
            "<5QqIHH", launch.table, 16 + place * 56
        )
        at = at_coefficients + which * COEFFICIENT_BYTES
        coefficients = launch.table[at : at + COEFFICIENT_BYTES]
        runs.append(
            Read(param=param, grad=grad, states=(state0, state1), param_out=out, numel=numel,
                 first_chunk=first, coefficients=coefficients, head=head)
        )  # fmt: skip
    return factor, num_chunks, runs


def make_run(
    numel: int, *, at: int = 1 << 20, variant: Variant = FP32, group: int = 0, odd: int = 0, base: int = 0
) -> Run:
    """Arrays far from each other, each from element `at` of 256-byte aligned memory on;
    `odd` bytes shift the gradient.
    """
    item = 2 if variant is BF16 else 4
    place = base << 40
    return Run(
        variant=variant,
        numel=numel,
        param=place + (1 << 36) + 4 * at,
        grad=place + (2 << 36) + item * at + odd,
        states=(place + (3 << 36) + 4 * at, place + (4 << 36) + 4 * at),
        param_out=place + (5 << 36) + item * at if variant is BF16 else 0,
        coefficients=group.to_bytes(COEFFICIENT_BYTES, "little"),
    )


def plan(runs: list[Run], sizes: tuple = (SMALL, LARGE), factor: int = 0) -> tuple[Launch, ...]:  # type: ignore[type-arg]
    return plan_launches(runs, coefficient_bytes=COEFFICIENT_BYTES, sizes=sizes, factor=factor)


# ---- one run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [FP32, BF16])
@pytest.mark.parametrize("at", range(17))
def test_the_head_ends_where_every_array_is_aligned(variant: Variant, at: int) -> None:
    run = make_run(1000, at=at, variant=variant)
    step = 8 if variant is BF16 else 4
    assert run.head == -at % step
    for address, item in run.addresses():
        assert (address + run.head * item) % 16 == 0


def test_arrays_that_never_are_aligned_together_are_unaligned() -> None:
    assert make_run(1000, at=0, odd=4).head == UNALIGNED
    assert make_run(1000, at=0, variant=BF16, odd=2).head == UNALIGNED
    assert make_run(1000, at=4, variant=BF16, odd=8).head == UNALIGNED  # float32 aligned, 16-bit halfway


def test_a_head_is_no_longer_than_its_run() -> None:
    assert make_run(3, at=1, variant=BF16).head == 3
    assert make_run(1, at=3).head == 1


@pytest.mark.parametrize(
    ("numel", "head", "chunks"),
    [
        (1, 0, 1),
        (7, 7, 1),  # all of it is head: the chunk takes it along
        (CHUNK_NUMEL, 0, 1),
        (CHUNK_NUMEL, UNALIGNED, 1),
        (CHUNK_NUMEL + 1, 0, 2),
        (CHUNK_NUMEL + 1, UNALIGNED, 2),
        (CHUNK_NUMEL + 7, 7, 1),
        (CHUNK_NUMEL + 8, 7, 2),
        (10 * CHUNK_NUMEL, 1, 10),
        (10**10, 0, -(-(10**10) // CHUNK_NUMEL)),
    ],
)
def test_chunks_are_counted_behind_the_head(numel: int, head: int, chunks: int) -> None:
    assert num_chunks_of(numel, head) == chunks


def test_a_table_has_what_the_kernel_declares() -> None:
    run = make_run(20_000, at=3, variant=BF16, group=77)
    (launch,) = plan([run], factor=0xABCD)
    factor, num_chunks, (seen,) = read(launch)
    assert (factor, num_chunks) == (0xABCD, 3)
    assert launch.num_chunks == 3
    assert seen == Read(
        param=run.param, grad=run.grad, states=run.states, param_out=run.param_out, numel=20_000,
        first_chunk=0,
        coefficients=(77).to_bytes(8, "little"), head=5,
    )  # fmt: skip
    assert launch.size is SMALL


# ---- many runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_table_fits_in_a_kernels_parameters(size) -> None:  # type: ignore[no-untyped-def]
    runs = [make_run(5, base=i, group=i % size.max_coefficients) for i in range(size.max_runs)]
    (launch,) = plan_launches(runs, coefficient_bytes=MOST_COEFFICIENT_BYTES, sizes=(size,))
    assert (
        len(launch.table) + 8 <= PARAMETER_BYTES[size]
    )  # and the pointer that the norm's kernel has beside it


@pytest.mark.parametrize(
    ("num_runs", "num_groups", "sizes", "runs_of_launches"),
    [
        (64, 8, (SMALL, LARGE), [64]),
        (65, 1, (SMALL, LARGE), [65]),
        (512, 64, (SMALL, LARGE), [512]),
        (513, 1, (SMALL, LARGE), [512, 1]),
        (64, 9, (SMALL, LARGE), [64]),
        (64, 9, (SMALL,), [8, 8, 8, 8, 8, 8, 8, 8]),
        (65, 1, (SMALL,), [64, 1]),
        (130, 130, (SMALL, LARGE), [64, 64, 2]),
        (0, 1, (SMALL, LARGE), []),
    ],
)
def test_the_smallest_table_that_holds_all_is_taken_else_several_of_the_largest(
    num_runs: int,
    num_groups: int,
    sizes: tuple,
    runs_of_launches: list[int],  # type: ignore[type-arg]
) -> None:
    launches = plan([make_run(5, base=i, group=i % num_groups) for i in range(num_runs)], sizes)
    assert [len(read(launch)[2]) for launch in launches] == runs_of_launches


def test_a_rest_that_fits_in_a_small_table_gets_one() -> None:
    first, second = plan([make_run(5, base=i) for i in range(513)])
    assert (first.size, second.size) == (LARGE, SMALL)


def test_runs_without_elements_are_left_out() -> None:
    (launch,) = plan([make_run(0), make_run(5), make_run(0)])
    assert [run.numel for run in read(launch)[2]] == [5]


def test_each_variant_has_launches_of_its_own_in_order() -> None:
    runs = [make_run(5 + i, base=i, variant=BF16 if i % 3 else FP32) for i in range(7)]
    launches = plan(runs)
    assert [launch.variant for launch in launches] == [FP32, BF16]
    assert [[run.numel for run in read(launch)[2]] for launch in launches] == [[5, 8, 11], [6, 7, 9, 10]]


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40_000), st.integers(0, 20), st.sampled_from([FP32, BF16]), st.integers(0, 12),
            st.sampled_from([0, 0, 4]),
        ),
        max_size=150,
    ),
    st.sampled_from([(SMALL,), (SMALL, LARGE)]),
)  # fmt: skip
def test_every_element_is_in_one_chunk_of_one_launch(what, sizes) -> None:  # type: ignore[no-untyped-def]
    """Walk as the kernel does: what chunks cover, head and all, is each run from end to end, and no more."""
    runs = [
        make_run(numel, at=at, variant=variant, group=group, odd=odd, base=i)
        for i, (numel, at, variant, group, odd) in enumerate(what)
    ]
    by_param = {run.param: run for run in runs if run.numel > 0}
    for launch in plan(runs, sizes):
        _, num_chunks, seen = read(launch)
        ends = [*(run.first_chunk for run in seen[1:]), num_chunks]
        assert seen[0].first_chunk == 0
        for run, end in zip(seen, ends, strict=True):
            given = by_param.pop(run.param)
            assert (run.grad, run.numel, run.coefficients) == (given.grad, given.numel, given.coefficients)
            assert given.variant == launch.variant
            head = 0 if run.head == UNALIGNED else run.head
            covered = head
            for chunk in range(end - run.first_chunk):
                begin = head + chunk * CHUNK_NUMEL
                assert begin == covered
                covered = min(begin + CHUNK_NUMEL, run.numel)
            assert covered == run.numel
    assert not by_param

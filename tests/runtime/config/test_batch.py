"""train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * world_size."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dslaunch.runtime.config.batch import BatchSizes, resolve_batch


@pytest.mark.parametrize(
    ("train", "micro", "steps", "world_size", "expected"),
    [
        # given                          # (train, micro, steps)
        (32, 4, 2, 4, (32, 4, 2)),
        (32, 4, None, 4, (32, 4, 2)),
        (32, None, 2, 4, (32, 4, 2)),
        (None, 4, 2, 4, (32, 4, 2)),
        (32, None, None, 4, (32, 8, 1)),
        (None, 4, None, 4, (16, 4, 1)),
        (1, None, None, 1, (1, 1, 1)),
    ],
)
def test_the_side_that_is_missing_follows_from_the_others(
    train: int | None, micro: int | None, steps: int | None, world_size: int, expected: tuple[int, int, int]
) -> None:
    batch = resolve_batch(train, micro, steps, world_size=world_size)
    assert (batch.train_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps) == expected


@pytest.mark.parametrize(
    ("train", "micro", "steps", "world_size", "message"),
    [
        (
            32,
            4,
            2,
            3,
            "train_batch_size 32 is not train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps 2 * "
            "world_size 3 = 24; write 24, or leave one of the three out",
        ),
        (
            30,
            4,
            None,
            2,
            (
                "train_batch_size 30 is not a multiple of train_micro_batch_size_per_gpu 4 * world_size 2 = "
                "8; 24 and 32 are"
            ),
        ),
        (
            3,
            None,
            4,
            2,
            "train_batch_size 3 is not a multiple of gradient_accumulation_steps 4 * world_size 2 = 8; 8 is",
        ),
        (32, None, None, 3, "train_batch_size 32 is not a multiple of world_size 3; 30 and 33 are"),
        (None, None, None, 2, "train_batch_size or train_micro_batch_size_per_gpu must be given"),
        (
            None,
            None,
            4,
            2,
            "train_batch_size or train_micro_batch_size_per_gpu must be given; "
            "gradient_accumulation_steps 4 alone does not say how large a batch is",
        ),
    ],
)
def test_sides_that_do_not_fit_are_refused_with_the_numbers_that_would(
    train: int | None, micro: int | None, steps: int | None, world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match="train_batch_size") as caught:
        resolve_batch(train, micro, steps, world_size=world_size)
    assert str(caught.value) == message


sides = st.none() | st.integers(1, 64)


@given(train=sides, micro=sides, steps=sides, world_size=st.integers(1, 16))
def test_what_comes_out_always_agrees_with_itself_and_with_what_was_given(
    train: int | None, micro: int | None, steps: int | None, world_size: int
) -> None:
    try:
        batch = resolve_batch(train, micro, steps, world_size=world_size)
    except ValueError:
        return
    out = (batch.train_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps)
    assert batch.train_batch_size == batch.micro_batch_size * batch.gradient_accumulation_steps * world_size
    assert all(side is None or side == found for side, found in zip((train, micro, steps), out, strict=True))
    assert min(out) >= 1


@given(micro=st.integers(1, 64), steps=st.integers(1, 64), world_size=st.integers(1, 64))
def test_any_two_sides_give_the_same_triangle(micro: int, steps: int, world_size: int) -> None:
    train = micro * steps * world_size
    whole = BatchSizes(train_batch_size=train, micro_batch_size=micro, gradient_accumulation_steps=steps)
    assert resolve_batch(train, micro, None, world_size=world_size) == whole
    assert resolve_batch(train, None, steps, world_size=world_size) == whole
    assert resolve_batch(None, micro, steps, world_size=world_size) == whole
    assert resolve_batch(train, micro, steps, world_size=world_size) == whole

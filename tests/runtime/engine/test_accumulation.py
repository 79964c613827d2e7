"""Which micro batch of a step it is, by counting alone."""

from __future__ import annotations

from dslaunch.runtime.engine.accumulation import Accumulation


def test_a_step_that_has_more_micro_batches_than_it_needs_ends_with_the_next() -> None:
    accumulation = Accumulation(4)
    for _ in range(3):
        accumulation.begin_micro_batch()
        accumulation.end_micro_batch(is_boundary=accumulation.is_boundary)
    accumulation.steps = 2  # set_train_batch_size() in the middle of a step
    assert accumulation.is_boundary


def test_the_end_of_an_inner_no_sync_leaves_the_outer_one() -> None:
    accumulation = Accumulation(1)
    with accumulation.no_sync():
        with accumulation.no_sync():
            pass
        assert accumulation.is_in_no_sync
    assert not accumulation.is_in_no_sync


def test_nothing_waits_once_it_is_forgotten() -> None:
    accumulation = Accumulation(3)
    accumulation.begin_micro_batch()
    accumulation.end_micro_batch(is_boundary=False)
    accumulation.begin_micro_batch()
    assert accumulation.num_partial == 2
    assert accumulation.forget() == 1  # the second had not ended
    assert (accumulation.num_partial, accumulation.is_boundary) == (0, False)

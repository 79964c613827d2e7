"""Configurations that a job could have: bounds, what is tried next, and the rows with their reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.fit.candidates import Candidate, ModelBytes, Placing, model_bytes, smaller
from dslaunch.launcher.fit.finding import finding_of
from dslaunch.launcher.fit.step_time import COMPUTE, TimeRange
from dslaunch.launcher.fit.suggestion import Suggestions, Tried, in_order

from .answers import GIB, answer, memory, rehearsed

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = ModelBytes(
    num_trained=GIB,
    num_frozen=0,
    number_bytes=2,
    activation_bytes=GIB,
    micro_batch_size=2,
    num_micro_batches=2,
)
ON_HOST = Placing(stage=3, has_optimizer_on_host=True, has_parameters_on_host=True)


def test_sizes_are_those_that_the_rehearsal_told() -> None:
    found = answer(model={"num_trained": GIB, "num_frozen": 0, "micro_batch_size": 8, "num_micro_batches": 2})
    assert model_bytes(found, {"bf16": {"enabled": True}}) == ModelBytes(
        num_trained=GIB,
        num_frozen=0,
        number_bytes=2,
        activation_bytes=GIB,
        micro_batch_size=8,
        num_micro_batches=2,
    )


@pytest.mark.parametrize(
    ("placing", "gibs"),
    [
        # parameters, gradients, masters and states of 4 ranks, activations of 2 samples, outside of torch
        (Placing(stage=1), 2 + 2 + 12 / 4 + 2 + 1),
        (Placing(stage=2), 2 + 4 / 4 + 12 / 4 + 2 + 1),
        (Placing(stage=3), 2 / 4 + 4 / 4 + 12 / 4 + 2 + 1),
        (Placing(stage=2, has_optimizer_on_host=True), 2 + 2 + 1),
        (ON_HOST, 2 + 1),
    ],
)
def test_a_bound_has_the_parts_that_a_rank_surely_needs(placing: Placing, gibs: float) -> None:
    assert SIZES.bound(placing, 2, num_ranks=4) == int(gibs * GIB)


def test_micro_batches_keep_the_samples_of_a_step() -> None:
    found = dict(SIZES.candidates(num_ranks=4, limit_bytes=9 * GIB, has_stages=False))
    assert [one.text for one in found[Placing(stage=1)]] == ["stage 1, micro batch 1 x 4"]
    assert [one.text for one in found[ON_HOST]] == [
        f"stage 3, optimizer and parameters on cpu, micro batch {sizes}"
        for sizes in ("4 x 1", "2 x 2", "1 x 4")
    ]
    assert [one.stage for one, _ in SIZES.candidates(num_ranks=4, limit_bytes=GIB, has_stages=True)] == [1]
    assert SIZES.hosts_needed(ranks_per_host=2, limit_bytes=5 * GIB) == 3
    assert SIZES.hosts_needed(ranks_per_host=2, limit_bytes=2 * GIB) is None


def test_a_candidate_changes_its_own_keys_of_the_ds_config() -> None:
    base: dict[str, Any] = {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}, "overlap_comm": True},
    }
    placing = Placing(stage=2, has_optimizer_on_host=True)
    made = Candidate(placing=placing, micro_batch_size=2, num_micro_batches=4).config(base)
    assert made == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    assert base["zero_optimization"]["stage"] == 1


def test_a_micro_batch_that_was_too_large_is_tried_smaller() -> None:
    tried, *others = [
        Candidate(placing=ON_HOST, micro_batch_size=size, num_micro_batches=8 // size)
        for size in (8, 4, 2, 1)
    ]
    # 3 GiB of parameters, 1 of gradients, 1 outside of torch; 16 of activations
    found = answer(activations=16)
    assert smaller((tried, *others), tried, found, 14 * GIB) == others[0]
    assert smaller((tried, *others), tried, found, 12 * GIB) == others[1]
    assert smaller((tried, *others), tried, found, 6 * GIB) is None


def tried(stage: int, *, activations: float, seconds: float = 1.0) -> Tried:
    times = [{COMPUTE: TimeRange(seconds, 4 * seconds)}]
    found = finding_of(
        [rehearsed(answer(activations=activations))], memory(), device="A10", device_from="", times=times
    )
    candidate = Candidate(placing=Placing(stage=stage), micro_batch_size=1, num_micro_batches=4)
    return Tried(candidate=candidate, finding=found)


def test_rows_have_the_fastest_first_and_a_reason() -> None:
    failed = Candidate(placing=Placing(stage=3), micro_batch_size=1, num_micro_batches=4)
    found = Suggestions(
        tried=in_order(
            [
                tried(1, activations=20),
                tried(2, activations=8, seconds=3),
                tried(3, activations=9, seconds=2),
                Tried(candidate=failed, finding=None, why_not="no"),
            ]
        ),
        too_large=((ON_HOST, 30 * GIB),),
        hosts_needed=None,
        config={},
    )
    text = "\n".join(found.lines()) + "\n"
    assert text == (GOLDEN / "plan-suggest.txt").read_text(), f"\n{text}"
    assert [one["fits"] for one in found.as_data()] == [True, True, False, False]


def test_where_nothing_fits_the_hosts_that_would_are_named() -> None:
    found = Suggestions(tried=(tried(3, activations=20),), too_large=(), hosts_needed=6, config={})
    assert found.best is None
    assert found.lines()[1] == (
        "suggested: nothing that was tried fits with a tenth to spare; by the parts of stage 3 alone it "
        "takes 6 such hosts at least"
    )

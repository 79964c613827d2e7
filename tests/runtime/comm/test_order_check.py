"""A step that was not the same on all ranks is an error that says where, before anything is updated."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch.runtime.comm.flight_recorder import DATA_LANE, Collective, Line
from dslaunch.runtime.comm.order_check import OrderCheck, _first_difference
from dslaunch.runtime.comm.rank_group import Job
from dslaunch.runtime.comm.rank_names import RankNames
from dslaunch.runtime.comm.wire import Wire
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.errors import CollectiveError
from dslaunch.shared.axes import Axes
from tests.runtime.comm.watchdog.test_watchdog import Blocks, make_engine, train_step
from tests.runtime.pipeline.models import WIDTH, data, loss_fn, specs
from tests.runtime.pipeline.test_train import MICRO, SIZE, config_of, pairs
from tests.runtime.ranks import Ranks


def _train(rank: int, stage: int, order: tuple[int, ...], is_debug: bool) -> tuple[int, str]:
    """Steps that passed, and the error of the first that did not. Rank 2 takes the units in this order."""
    os.environ["DSLAUNCH_DEBUG"] = "collectives" if is_debug else ""
    try:
        engine = make_engine(stage)
    finally:
        del os.environ["DSLAUNCH_DEBUG"]
    model = engine.module
    assert isinstance(model, Blocks)
    if rank == 2:
        model.order = order
    for step in range(5):
        try:
            train_step(engine)
        except CollectiveError as error:
            assert engine.global_steps == step
            return step, str(error)
    return 5, ""


@torch.no_grad()
def _evaluate(rank: int, order: tuple[int, ...]) -> None:
    """Evaluate, and once more on each rank; rank 2 takes the units in this order."""
    engine = make_engine(3)
    model = engine.module
    assert isinstance(model, Blocks)
    if rank == 2:
        model.order = order
    inputs = torch.ones(1, 8)
    with dslaunch.zero.GatheredParameters(model.parameters()):
        expected = model(inputs)
    for _ in range(2):
        assert torch.equal(engine(inputs), expected)


def test_a_forward_without_gradients_in_another_order_is_right(ranks: Ranks) -> None:
    ranks(_evaluate, (0, 1, 2, 4, 3, 5), world_size=3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_that_are_the_same_pass_at_every_stage(ranks: Ranks, stage: int) -> None:
    assert ranks(_train, stage, (0, 1, 2, 3, 4, 5), True, world_size=3) == [(5, "")] * 3


@pytest.mark.parametrize("is_debug", [False, True])
def test_units_of_one_size_in_another_order_do_not_hang_and_are_found_before_the_step(
    ranks: Ranks, is_debug: bool
) -> None:
    """Without the check they would exchange each other's values in silence."""
    results = ranks(_train, 3, (0, 1, 2, 4, 3, 5), is_debug, world_size=3)
    assert results == [results[0]] * 3, "every rank says the same"
    step, message = results[0]
    assert step == 0
    assert message.startswith("rank 2's collective ")
    assert " of step 1 was all_gather of unit 'blocks." in message
    assert ", rank 0's was all_gather of unit 'blocks." in message


def _compare(rank: int, labels: tuple[tuple[tuple[str, int], ...], ...]) -> str:
    job = Job(Wire())
    check = OrderCheck(job, timeout=timedelta(seconds=20))
    for what, numel in labels[rank]:
        # As a rank records them; what is sent here does not matter.
        job.wire.begin("all_gather", torch.empty(numel), what).run(lambda: None)
    try:
        check.compare()
    except CollectiveError as error:
        return str(error).partition(": every rank")[0]
    return ""


A, B = ("unit 'a'", 1), ("unit 'b'", 1)


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        (((A, B), (A, B), (A, B)), ""),
        (
            ((A, B), (A, B), (A, A)),
            "rank 2's collective 2 of step 1 was all_gather of unit 'a', rank 0's was all_gather of unit 'b'",
        ),
        (
            ((A,), (A, B), (A,)),
            "rank 1's collective 2 of step 1 was all_gather of unit 'b', rank 0's was none at all",
        ),
        (
            ((A,), (), (A,)),
            "rank 1's collective 1 of step 1 was none at all, rank 0's was all_gather of unit 'a'",
        ),
        (
            ((A,), (("unit 'a'", 2),), (A,)),
            (
                "rank 1's collective 1 of step 1 was all_gather of unit 'a' (8 bytes), rank 0's was "
                "all_gather of unit 'a' (4 bytes)"
            ),
        ),
    ],
)
def test_the_first_difference_is_named(
    ranks: Ranks, orders: tuple[tuple[tuple[str, int], ...], ...], expected: str
) -> None:
    assert ranks(_compare, orders, world_size=3) == [expected] * 3


def _compare_data(rank: int, whats: tuple[str, ...]) -> str:
    """Pairs of ranks have samples of their own, and send each other activations; then all compare."""
    job = Job(Wire())
    lines = [(0, 1), (2, 3)]
    check = OrderCheck(job, data_lines={"tp": lines}, timeout=timedelta(seconds=20))
    for what in whats[rank]:
        send = job.wire.begin(
            "all_reduce",
            torch.empty(1 + rank // 2),
            f"layer '{what}'",
            lane=DATA_LANE,
            line=Line("tp", lines[rank // 2]),
        )
        send.run(lambda: None)
    told = job.all_gather_float64(torch.tensor(check.fingerprints, dtype=torch.float64), what="fingerprints")
    try:
        check.check(told.tolist())
    except CollectiveError as error:
        return str(error)
    return ""


def test_what_depends_on_data_is_compared_among_ranks_with_the_same_data(ranks: Ranks) -> None:
    """The pairs differ in sizes, number and order, and that is right; rank 3 differs from rank 2."""
    assert ranks(_compare_data, ("ab", "ab", "b", "b"), world_size=4) == [""] * 4
    results = ranks(_compare_data, ("ab", "ab", "cd", "dc"), world_size=4)
    assert results == [results[0]] * 4
    assert results[0].startswith(
        "rank 3's collective 1 of step 1 was all_reduce of layer 'd' over tp, rank 2's was all_reduce of "
        "layer 'c' over tp: ranks along tp compute together and must use the same layers, in the same order"
    )


def _alone(rank: int) -> str:
    check = OrderCheck(Job(Wire()), timeout=timedelta(seconds=1))
    if rank == 1:
        return ""
    with pytest.raises(CollectiveError) as caught:
        check.compare()
    return str(caught.value)


def _apart(rank: int) -> str:
    job = Job(Wire())
    check = OrderCheck(job, timeout=timedelta(seconds=20), grace=timedelta(seconds=1))
    job.wire.begin("all_gather", torch.empty(1), f"unit '{rank // 2}'").run(lambda: None)
    if rank == 2:
        return ""
    with pytest.raises(CollectiveError) as caught:
        check.check([[1.0], [1.0], [2.0]])
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_went_another_way_and_waits_there_is_named_by_the_others(ranks: Ranks) -> None:
    first, second, _ = ranks(_apart, world_size=3)
    assert first == second
    assert first.startswith(
        "rank 2 did other collectives than rank 0 in step 1 and has not come to tell which; rank 0's last "
        "were all_gather of unit '0': every rank must use the same units"
    )


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_the_end_of_the_step_is_not_waited_for_for_ever(ranks: Ranks) -> None:
    message = "rank 1 has not come to the end of step 1, at which rank 0 has waited 1 s for it"
    assert ranks(_alone, world_size=2)[0].startswith(message)


def _train_in_stages(rank: int, turned: int) -> str:
    """Each stage looks at layers of its own before a step, and the rank `turned` in another order."""
    module = PipelineModule(specs(is_tied=False), 2, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = dslaunch.initialize(model=module, config=config_of(3))
    names = [name for name, param in module.named_parameters() if param.ds_numel == 2 * WIDTH * WIDTH]
    assert len(names) > 1, "units of one size"
    for name in names[::-1] if rank == turned else names:
        with dslaunch.zero.GatheredParameters([module.get_parameter(name)]):
            pass
    batch = data(0, size=SIZE * MICRO * engine.dp_world_size)
    try:
        engine.train_batch(pairs(*batch, engine, MICRO))
    except CollectiveError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_ranks_of_stages_are_told_with_their_places_and_who_did_as_they(ranks: Ranks) -> None:
    """2 stages x 2 ranks with data of their own: rank 3 is one of stage 1, and stage 0 is not to blame."""
    assert ranks(_train_in_stages, -1, world_size=4) == [""] * 4
    results = ranks(_train_in_stages, 3, world_size=4)
    assert results == [results[0]] * 4

    assert re.fullmatch(
        r"rank 3 \(stage 1 of 2, dp 1\)'s collective \d+ of step 1 was all_gather of unit '[^']+', "
        r"rank 2 \(stage 1 of 2, dp 0\)'s was all_gather of unit '[^']+': the ranks that train the same "
        r"layers must use the same units, in the same order; look for a branch that depends on the rank or "
        r"its data",
        results[0],
    )


def test_who_did_as_which_rank_is_said_of_those_with_the_same_layers() -> None:
    """2 stages x 4 ranks with data of their own."""
    axes = Axes(pp=2, dp=4)
    orders: dict[int, list[Any] | None] = {rank: ["x", "y"] if rank < 4 else ["a", "b"] for rank in range(8)}
    orders |= {5: ["b", "a"], 7: ["b", "a"]}
    told = {
        rank: [
            Collective(0, number, 1, "all_gather", f"unit '{unit}'", 4)
            for number, unit in enumerate(order or (), start=1)
        ]
        for rank, order in orders.items()
    }
    said = _first_difference(told, 1, axes.leaders, RankNames(axes.places))
    assert said.startswith(
        "rank 5 (stage 1 of 2, dp 1)'s collective 1 of step 1 was all_gather of unit 'b', rank 4 (stage 1 of "
        "2, dp 0)'s was all_gather of unit 'a'; rank 6 (stage 1 of 2, dp 2) did as rank 4; rank 7 (stage 1 "
        "of 2, dp 3) did as rank 5: the ranks that train the same layers must use the same units"
    )

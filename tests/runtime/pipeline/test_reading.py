"""Data that fail, end or are missing on one rank: all are told before the first layer, and go on after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.errors import ConfigError, PipelineError
from tests.runtime.pipeline.models import data, loss_fn, specs
from tests.runtime.pipeline.test_engine import engine_of
from tests.runtime.pipeline.test_train import MICRO, SIZE, pairs
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.slow


def _read(rank: int, num_stages: int) -> list[str]:
    """What each of 4 ranks is told: 2 stages of 2 copies, or 4 stages."""
    module = PipelineModule(specs(is_tied=False), num_stages, loss_fn=loss_fn, base_seed=7, seed_layers=True)
    engine = engine_of(module, 1)
    batch = list(pairs(*data(0, size=SIZE * MICRO * 2), engine, MICRO))
    told = []

    def fails() -> Iterator[Any]:
        yield from batch[:1]
        raise OSError(f"disk of rank {rank}")

    def other_type() -> Iterator[Any]:
        yield from batch[:3]
        yield batch[3][0]

    def tell(call: Any, given: Any = None) -> None:
        try:
            told.append(f"{call(given).item():.6f}")
        except (StopIteration, ConfigError, PipelineError, OSError) as error:
            told.append(f"{type(error).__name__}: {error}")

    train, evaluate = engine.train_batch, engine.eval_batch
    tell(train, fails() if rank == 3 else iter(batch))
    tell(train, fails() if rank in (0, 3) else iter(batch))
    tell(train, other_type() if rank == 0 else iter(batch))
    tell(train, batch if rank == 0 else iter(batch))
    tell(train, iter(batch[:0] if engine.stage_id in (0, num_stages - 1) and rank % 2 else batch))
    tell(evaluate, iter(batch[:0]))
    tell(evaluate, fails() if rank == 3 else iter(batch))
    assert (engine.global_steps, engine.micro_steps) == (0, 0)
    whole = [iter(batch) for _ in range(2)]
    tell(evaluate, whole[0])
    tell(train, whole[1])
    tell(train)  # the iterator that was given last
    engine.set_dataiterator(None)
    tell(train, None if rank == 0 else iter(batch))
    return told


@pytest.mark.parametrize("num_stages", [2, 4])
def test_no_rank_begins_a_batch_that_another_cannot_take(ranks: Ranks, num_stages: int) -> None:
    told = ranks(_read, num_stages, world_size=4)
    first, last = ("0 (stage 0 of 2, dp 0)", "3 (stage 1 of 2, dp 1)")
    if num_stages == 4:
        first, last = "0 (stage 0 of 4)", "3 (stage 3 of 4)"
    for rank, (one, two, kind, no_iterator, ended, no_more, evaluated, *rest) in enumerate(told):
        failed = f"PipelineError: rank {last} cannot take its 4 micro batches, so that no rank begins: "
        own = "OSError: disk of rank 3"
        assert one == evaluated == (own if rank == 3 else failed + own)
        assert two == {0: "OSError: disk of rank 0", 3: own}.get(
            rank, f"{failed.replace(last, first)}OSError: disk of rank 0"
        )
        assert "a micro batch is Tensor of" in kind
        assert (f"rank {first} cannot take its 4 micro batches" in kind) == (rank > 0)
        assert "train_batch() and eval_batch() take an iterator, and were given list" in no_iterator
        full, empty = ("ranks 0,2 (dp 0)", "ranks 1,3 (dp 1)")
        if num_stages == 4:
            full, empty = f"rank {first}", f"rank {last}"
        assert ended.startswith("ConfigError: the data ended in the middle of a batch of 4 micro batches: ")
        assert f"there were 4 on {full}, 0 on {empty}; " in ended
        assert no_more == "StopIteration: the data have ended"
        before, trained, after, without = rest
        assert before == trained, "nothing was trained before"
        assert after == "StopIteration: the data have ended"
        assert "there are no data: give train_batch(data_iter)" in without
        assert without.startswith("ConfigError") == (rank == 0)
    assert len({tuple(rest[-4:-2]) for rest in told}) == 1

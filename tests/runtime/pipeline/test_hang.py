"""A rank of a pipeline that stands still is named with its stage and the micro batch that is waited for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from tests.runtime.comm.watchdog.test_watchdog import LAST_LINE, hold_up, impatient, tcp_group, watched_into
from tests.runtime.pipeline.models import data, loss_fn, specs
from tests.runtime.pipeline.test_train import MICRO, SIZE, config_of, pairs
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.slow

VICTIM = 2  # of 2 stages x 2 ranks with data of their own: stage 1, dp 0


class Holds(nn.Module):
    """Stands still in some forwards until so many hangs have been reported."""

    def __init__(self, report: Path) -> None:
        super().__init__()
        self.report, self.num_reports = report, 0
        self.in_micro_batch = -1

    def forward(self, x: Tensor) -> Tensor:
        if self.in_micro_batch == 0:
            self.hold()
        self.in_micro_batch -= 1
        return x

    def hold(self) -> None:
        self.num_reports += 1
        hold_up(lambda: self.report.read_text().count(LAST_LINE) >= self.num_reports)


def _held(rank: int, folder: str) -> list[str]:
    path = Path(folder)
    with tcp_group(rank, path), watched_into(path / f"stderr-{rank}"):
        holds = Holds(path / "stderr-0")
        layers = [*specs(is_tied=False)[:-1], holds, specs(is_tied=False)[-1]]
        module = PipelineModule(layers, 2, loss_fn=loss_fn, partition_method="uniform")
        engine: Any
        engine, *_ = dslaunch.initialize(model=module, config=config_of(1))
        micro = list(pairs(*data(0, size=SIZE * MICRO * 2), engine, MICRO))

        def stream() -> Iterator[Any]:
            yield from micro[:2]
            if where == "data" and rank == VICTIM:
                holds.hold()
            yield from micro[2:]

        for where in ("nothing", "layer", "data"):
            if rank == VICTIM:
                holds.in_micro_batch = 1 if where == "layer" else -1
            if where == "nothing":
                engine.train_batch(stream())
                continue
            with impatient(engine):
                engine.train_batch(stream())
        engine.destroy()
    return (path / f"stderr-{rank}").read_text().splitlines()


def test_the_rank_that_does_not_send_is_named_with_its_stage_and_the_micro_batch(
    ranks: Ranks, tmp_path: Path
) -> None:
    report, *others = ranks(_held, str(tmp_path), world_size=4)
    assert others == [[], [], []], "one report for all"
    in_layer, in_data = [line for line in report if "it hangs" in line]
    victim, waiting = r"rank 2 \(stage 1 of 2, dp 0\)", r"rank 0 \(stage 0 of 2, dp 0\)"
    assert re.fullmatch(
        rf"dslaunch: it hangs: {victim} has not sent the gradient of what came into stage 1, micro batch 1 "
        rf"\(step 2\), for which {waiting} has waited \d+ s; in its own code for \d+ s, after \w+ of .+",
        in_layer,
    )
    assert re.fullmatch(
        rf"dslaunch: it hangs: {victim} has not come to all_gather of the micro batches "
        r"\(step \d\), for which ranks 0-1,3 have waited \d+ s; in its own code for \d+ s, after .+",
        in_data,
    )
    stacks = "\n".join(report)
    assert re.search(r"rank 2 \(stage 1 of 2, dp 0, \S+, pid \d+\), most recent call last:", stacks)
    assert "in forward" in stacks
    assert "in stream" in stacks


def _lengths(rank: int) -> int:
    """Some ranks know the shapes of their samples, others have new ones and wait to be told."""
    engine: Any
    module = PipelineModule(specs(is_tied=False), 2, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = dslaunch.initialize(model=module, config=config_of(1))
    is_other = rank % 2 == 1
    for lengths in ((5, 5, 5, 5), (3, 4, 7, 6) if is_other else (5, 5, 5, 5)):
        engine.train_batch(iter([data(n, size=SIZE, length=one) for n, one in enumerate(lengths)]))
    return int(engine.global_steps)


def test_ranks_whose_samples_have_other_shapes_do_the_same_collectives(ranks: Ranks) -> None:
    assert ranks(_lengths, world_size=4) == [2] * 4

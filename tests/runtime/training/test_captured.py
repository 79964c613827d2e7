"""Stage 3: functions in checkpoints may use parameters of any module, however these come to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dslaunch
from tests.exhaustive import few
from tests.runtime.models import batch, snapshot, worst_difference
from tests.runtime.ranks import Ranks
from tests.runtime.training import captured
from tests.runtime.training.captured import CASES, CHECKPOINTS, WIDTH, Captured, make
from tests.runtime.training.test_hard_cases import DRIFT, LR, check_freed, make_config

STEPS = 3
FEW = (captured.Keyword, captured.RowsBefore, captured.BeforeItsBlock, captured.Nested, captured.TiedHead)
Trained = tuple[list[float], dict[str, Tensor]]
# torch's reentrant kind takes no keywords, and a graph made outside it only once.
NOT_REENTRANT = (captured.Keyword, captured.FunctionsOnly)


def _train(rank: int, kinds: tuple[type[Captured], ...], run: str, calls_engine: bool) -> list[Trained]:
    results = []
    for kind in kinds:
        losses = []
        engine, *_ = dslaunch.initialize(model=make(kind, run), config=make_config(3))
        for step in range(STEPS):
            loss = engine(batch(step, width=WIDTH).chunk(2)[rank]).pow(2).mean()
            losses.append(loss.item())
            if calls_engine:
                engine.backward(loss)
            else:
                engine.scale(loss).backward()
            engine.step()
            check_freed(engine)
        results.append((losses, snapshot(engine.module.named_parameters())))
        engine.destroy()
    return results


def _reference(kind: type[Captured], run: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    model = make(kind, run)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        optimizer.zero_grad()
        for part, own in zip(batch(step, width=WIDTH).chunk(2), losses, strict=True):
            loss = model(part).pow(2).mean()
            own.append(loss.item())
            (loss / 2).backward()
        optimizer.step()
    return losses, snapshot(model.named_parameters())


@pytest.mark.parametrize(
    ("run", "kinds", "calls_engine"),
    few(
        [(run, kinds, True) for run in CHECKPOINTS for kinds in (FEW, CASES)]
        + [(run, CASES, False) for run in CHECKPOINTS],
        lambda run, kinds, calls_engine: kinds is FEW,
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_captured_parameter_trains_as_in_one_process(
    ranks: Ranks, run: str, kinds: tuple[type[Captured], ...], calls_engine: bool
) -> None:
    kinds = tuple(kind for kind in kinds if run != "reentrant" or kind not in NOT_REENTRANT)
    expected = [_reference(kind, run) for kind in kinds]
    for rank, results in enumerate(ranks(_train, kinds, run, calls_engine, world_size=2)):
        for (losses, params), (all_losses, plain), kind in zip(results, expected, kinds, strict=True):
            assert losses == pytest.approx(all_losses[rank], abs=DRIFT), kind
            assert worst_difference(params, plain) <= DRIFT, kind

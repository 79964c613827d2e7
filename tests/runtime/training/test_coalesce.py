"""engine.coalesce_grad_reduction() and allreduce_gradients(): when gradients travel,
and that nothing else changes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import (
    assert_same_bits,
    batch,
    loss_of,
    make_config,
    make_model,
    snapshot,
    worst_difference,
)
from tests.runtime.ranks import Ranks

STAGES = (0, 1, 2, 3)
MICRO_BATCHES = 3
# Ranks and micro batches are added in another order: a few roundings of gradients below 100. Seen: 2e-7.
DRIFT = 1e-6


def _engine(stage: int, **changes: Any) -> dslaunch.Engine:
    config = make_config(
        stage=stage, gradient_accumulation_steps=MICRO_BATCHES, gradient_clipping=0.5, **changes
    )
    return dslaunch.initialize(model=make_model(), config=config)[0]


def _parts(engine: dslaunch.Engine, step: int) -> list[Tensor]:
    own = batch(step).chunk(engine.world_size)[engine.global_rank]
    return list(own.chunk(MICRO_BATCHES))


def _train(rank: int, stage: int, num_blocks: int) -> tuple[dict[str, Tensor], float | None, int]:
    """Three steps of three micro batches; with as many blocks around them. Also the bytes of reductions."""
    engine = _engine(stage)
    for step in range(3):
        micros = _parts(engine, step)
        if not num_blocks:
            for micro in micros:
                engine.backward(loss_of(engine, micro))
                engine.step()
            continue
        engine.set_gradient_accumulation_boundary(True)
        for run in [micros] if num_blocks == 1 else [micros[:2], micros[2:]]:
            with engine.coalesce_grad_reduction():
                for micro in run:
                    engine.backward(loss_of(engine, micro))
        engine.step()
    assert all(param.grad is None for param in engine.parameters()) == (stage >= 2)
    hashes = engine._domains.job.all_gather_objects(engine.comm_order_hash(), what="a test")
    assert len(set(hashes)) == 1
    sent = engine.comm_bytes().get("reduce_scatter", 0)
    return snapshot(engine.named_parameters()), engine.get_global_grad_norm(), sent


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_the_same_and_travel_once(ranks: Ranks, stage: int) -> None:
    plain, norm, sent = ranks(_train, stage, 0, world_size=2)[0]
    for num_blocks in (1, 2):
        params, norm_of_blocks, sent_of_blocks = ranks(_train, stage, num_blocks, world_size=2)[0]
        assert worst_difference(params, plain) <= DRIFT
        assert norm_of_blocks == pytest.approx(norm, rel=1e-5)
        # From stage 2 on each micro batch would send them; before, only the boundary does.
        assert sent_of_blocks == (sent * num_blocks // MICRO_BATCHES if stage >= 2 else sent)


def _branches(rank: int, is_coalesced: bool) -> dict[str, Tensor]:
    """Each rank uses a block that the other does not, and none uses the third."""
    model = make_model()
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=2, reduce_bucket_size=1))
    blocks = list(model.get_submodule("blocks").children())

    def backward() -> None:
        engine.backward(blocks[rank](model.get_submodule("first")(batch(0))).pow(2).mean())

    if is_coalesced:
        with engine.coalesce_grad_reduction():
            backward()
    else:
        backward()
    grads = {name: dslaunch.zero.safe_get_full_grad(param) for name, param in model.named_parameters()}
    return {name: grad for name, grad in grads.items() if grad is not None}


def test_ranks_may_use_different_parts_of_the_model(ranks: Ranks) -> None:
    plain, coalesced = (ranks(_branches, is_coalesced, world_size=2)[0] for is_coalesced in (False, True))
    assert_same_bits(plain, coalesced)
    assert float(plain["blocks.1.0.weight"].abs().max()) > 0.0


def _refused(rank: int, stage: int) -> list[str]:
    engine = _engine(stage)
    before = snapshot(engine.named_parameters())
    param = next(engine.parameters())
    said = []
    with engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine, batch(0, size=2)))
        attempts = [
            engine.step,
            lambda: engine.coalesce_grad_reduction().__enter__(),
            lambda: dslaunch.zero.safe_get_full_grad(param),
            lambda: dslaunch.zero.safe_set_full_grad(param, torch.zeros(param.shape)),
            engine.allreduce_gradients,
            engine.offload_states,
        ]
        engine.set_gradient_accumulation_boundary(True)
        for attempt in attempts:
            with pytest.raises(ConfigError) as caught:
                attempt()
            said.append(str(caught.value))
        engine.zero_grad()
    engine.step()
    assert engine.get_global_grad_norm() == 0.0  # what zero_grad() took away is not averaged
    with pytest.raises(ConfigError, match="without a gradient"), engine.coalesce_grad_reduction():
        engine.backward(engine.backward(loss_of(engine, batch(0, size=2))).detach())
    engine.step()
    assert engine.get_global_grad_norm() == 0.0  # nor what a block left that failed
    assert before.keys() == snapshot(engine.named_parameters()).keys()
    return said


@pytest.mark.parametrize("stage", [2, 3])
def test_what_needs_averages_is_refused_inside(ranks: Ranks, stage: int) -> None:
    said = ranks(_refused, stage, world_size=2)[0]
    assert said[0].startswith(
        "engine.step() inside engine.no_sync() or engine.coalesce_grad_reduction(); leave"
    )
    for line in said[1:]:
        assert line.startswith(
            "gradients are each rank's own inside engine.coalesce_grad_reduction(), until its end"
        )


def _averaged(rank: int, stage: int) -> tuple[list[Tensor | None], dict[str, Tensor], list[float | None]]:
    """p.grad after allreduce_gradients(), and what the step makes of it,
    beside an engine that was not asked.
    """
    engines = [_engine(stage), _engine(stage)]
    for is_asked, engine in zip((True, False), engines, strict=True):
        for number, micro in enumerate(_parts(engine, 0)):
            engine.backward(loss_of(engine, micro))
            if is_asked:
                engine.allreduce_gradients()  # nothing before the boundary
            if number < MICRO_BATCHES - 1:
                engine.step()
    grads = [None if param.grad is None else param.grad.clone() for param in engines[0].parameters()]
    for engine in engines:
        engine.step()
    found, expected = (snapshot(engine.named_parameters()) for engine in engines)
    assert_same_bits(found, expected)
    return grads, found, [engine.get_global_grad_norm() for engine in engines]


@pytest.mark.parametrize("stage", STAGES)
def test_allreduce_gradients_shows_averages_and_changes_no_step(ranks: Ranks, stage: int) -> None:
    model = make_model()
    loss_of(model, batch(0)).backward()
    for grads, _, norms in ranks(_averaged, stage, world_size=2):
        assert norms[0] == norms[1]
        for grad, param in zip(grads, model.parameters(), strict=True):
            assert (grad is None) == (stage >= 2)
            if grad is not None:
                assert param.grad is not None
                assert float((grad - param.grad).abs().max()) <= 1e-5  # of gradients up to 20

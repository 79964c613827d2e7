"""Stages of a pipeline go on from memory at other layouts, with the losses of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

import dslaunch
from dslaunch.runtime.checkpoint import snapshots
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from tests.launcher.node.memory.memory_hosts import memory_hosts
from tests.runtime.checkpoint.test_snapshots import _begin, _leave
from tests.runtime.pipeline.models import Judge, data, loss_fn, specs, take_values, train_alone
from tests.runtime.pipeline.test_layouts import CHAIN, SAMPLES, Layout
from tests.runtime.pipeline.test_train import SIZE, config_of, pairs
from tests.runtime.ranks import Ranks


def _train(rank: int, layout: Layout, step: int, sockets: list[str]) -> list[float]:
    """Go on from the snapshot of the layout before, for one step."""
    world_size, num_stages, schedule, stage = layout
    module = PipelineModule(specs(is_tied=True), num_stages, loss_fn=loss_fn, schedule=schedule)
    if step == 0:
        take_values(module, Judge(is_tied=True))
    num_micro = SAMPLES // SIZE // (world_size // num_stages)
    _begin(rank, sockets, attempt=step, every="1")
    engine, *_ = dslaunch.initialize(model=module, config=config_of(stage, num_micro))
    _leave()
    kept = engine.resume(client_state=lambda: {"step": engine.global_steps})
    assert kept == ({"step": step} if step else {})
    loss = engine.train_batch(pairs(*data(step, size=SAMPLES), engine, num_micro)).item()
    norm = engine.get_global_grad_norm()
    taken = engine._saver.snapshots
    engine.destroy()
    assert isinstance(taken, snapshots.Snapshots)
    assert taken.last_step == step + 1
    return [loss, norm]


@pytest.mark.exhaustive
def test_a_training_in_stages_goes_on_from_memory_at_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    losses, norms, _ = train_alone(
        Judge(is_tied=True), [data(step, size=SAMPLES) for step in range(len(CHAIN))]
    )
    with memory_hosts(tmp_path, "a", "b") as found:
        sockets = [str(one.socket) for one in found]
        for step, layout in enumerate(CHAIN):
            for loss, norm in ranks(_train, layout, step, sockets, world_size=layout[0]):
                assert loss == pytest.approx(losses[step], abs=5e-6)
                assert norm == pytest.approx(norms[step], rel=5e-6)

"""One training at several layouts: saved at one, continued at another, given away as a plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.pipeline.models import (
    Judge,
    data,
    loss_fn,
    specs,
    take_values,
    train_alone,
)
from tests.runtime.pipeline.test_train import SIZE, Trained, config_of, pairs
from tests.runtime.ranks import Ranks

SAMPLES = 16  # of a batch, whatever the layout
Layout = tuple[int, int, str, int]  # ranks, stages, schedule, ZeRO stage


def train(rank: int, layout: Layout, steps: list[int], folder: str, before: str | None) -> Trained:
    world_size, num_stages, schedule, stage = layout
    module = PipelineModule(specs(is_tied=True), num_stages, loss_fn=loss_fn, schedule=schedule)
    if before is None:
        take_values(module, Judge(is_tied=True))
    num_micro = SAMPLES // SIZE // (world_size // num_stages)
    engine, *_ = dslaunch.initialize(model=module, config=config_of(stage, num_micro))
    if before is not None:
        _, state = engine.load_checkpoint(folder, tag=before)
        assert state == {"note": before}
    losses, norms = [], []
    for step in steps:
        batch = data(step, size=SAMPLES)
        losses.append(engine.train_batch(pairs(*batch, engine, num_micro)).item())
        norms.append(engine.get_global_grad_norm())
    tag = f"after{steps[-1]}"
    engine.save_checkpoint(folder, tag=tag, client_state={"note": tag})
    engine.save_16bit_model(folder, f"{tag}.pt")
    engine.save_16bit_model(folder, f"{tag}.safetensors")
    values = {name: safe_get_full_fp32_param(param) for name, param in module.named_parameters()}
    engine.destroy()
    return losses, norms, values


CHAIN: list[Layout] = [
    (4, 2, "1f1b", 3),
    (3, 3, "interleaved", 1),
    (2, 1, "1f1b", 3),
    (4, 2, "zbv", 0),
]


def test_a_training_goes_on_at_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    judge = Judge(is_tied=True)
    steps = list(range(len(CHAIN)))
    found: list[list[Trained]] = []
    before: str | None = None
    for number, layout in enumerate(CHAIN):
        own = steps[number : number + 1]
        found.append(ranks(train, layout, own, str(tmp_path), before, world_size=layout[0]))
        before = f"after{own[-1]}"
    losses, norms, values = train_alone(judge, [data(step, size=SAMPLES) for step in steps])
    for number, trained in enumerate(found):
        for own_losses, own_norms, _ in trained:
            assert own_losses == pytest.approx(losses[number : number + 1], abs=5e-6)
            assert own_norms == pytest.approx(norms[number : number + 1], rel=5e-6)
    for name, value in values.items():
        own = next(trained[2][name] for trained in found[-1] if name in trained[2])
        torch.testing.assert_close(own, value, atol=5e-6, rtol=1e-5, msg=name)
    for suffix in ("pt", "safetensors"):
        plain = Judge(is_tied=True)
        path = tmp_path / f"{before}.{suffix}"
        if suffix == "pt":
            plain.load_state_dict(torch.load(path))
        else:
            from safetensors.torch import load_file

            plain.load_state_dict(load_file(path))
        for name, value in plain.named_parameters():
            own = next(trained[2][name] for trained in found[-1] if name in trained[2])
            assert torch.equal(own, value), name

"""Optimizers that see whole parameters, over parameters that are divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_grad
from tests.exhaustive import few
from tests.runtime.models import assert_same_bits
from tests.runtime.offload.residences import pretended
from tests.runtime.ranks import Ranks
from tests.runtime.tensor.models import loss_of_tokens, make_config, make_hugging_face, token_batches, train

pytest.importorskip("transformers")

OPTIMIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "Muon": ({"type": "Muon", "params": {"muon_lr": 0.05, "adam_lr": 0.003}}, "momentum_buffer"),
    "LAMB": ({"type": "Lamb", "params": {"lr": 0.02}}, "exp_avg"),
}


def _engine(name: str, stage: int, tp: int, device: str, folder: str) -> dslaunch.Engine:
    config = make_config(
        stage,
        tp=tp,
        optimizer=OPTIMIZERS[name][0],
        gradient_accumulation_steps=1,
        gradient_clipping=0.0,
    )
    config["zero_optimization"]["offload_optimizer"] = {"device": device, "nvme_path": folder}
    with pretended(device == "cpu"):
        return dslaunch.initialize(model=make_hugging_face("Llama"), config=config)[0]


def _values(engine: dslaunch.Engine, name: str) -> Iterator[tuple[str, Tensor]]:
    shapes = {param_name: param.shape for param_name, param in make_hugging_face("Llama").named_parameters()}
    for param_name, param in engine.module.named_parameters():
        key = OPTIMIZERS[name][1] if param.ndim > 1 and "embed" not in param_name else "exp_avg"
        key = "exp_avg" if "lm_head" in param_name else key
        for kind, value in (
            ("value", safe_get_full_fp32_param(param)),
            ("state", safe_get_full_optimizer_state(param, key)),
        ):
            assert value is not None
            assert value.shape == shapes[param_name]
            yield f"{kind} of {param_name}", value.clone()


def _trained(name: str, stage: int, tp: int, device: str, folder: str) -> dict[str, Tensor]:
    """Two steps whose gradients are the same however the model is divided."""
    engine = _engine(name, stage, tp, device, folder)
    random = torch.Generator().manual_seed(7)
    for _ in range(2):
        engine.backward(loss_of_tokens(engine, token_batches()[0][: 8 // (engine.world_size // tp)]))
        for param in engine.module.parameters():
            grad = safe_get_full_fp32_param(param)
            assert grad is not None
            safe_set_full_grad(param, torch.randn(grad.shape, generator=random))
        engine.step()
    values = dict(_values(engine, name))
    engine.destroy()
    return values


def _divided(rank: int, name: str, stage: int, folder: str) -> dict[str, Tensor]:
    expected = _trained(name, stage, 1, "none", folder)
    for device in ("none", "cpu", "nvme") if stage else ("none",):
        assert_same_bits(_trained(name, stage, 2, device, folder), expected)
    return expected


@pytest.mark.parametrize(
    ("name", "stage", "world_size"),
    few(
        [(name, stage, size) for name in OPTIMIZERS for stage in (0, 1, 2, 3) for size in (2, 4)],
        lambda name, stage, world_size: (name, stage, world_size) == ("Muon", 3, 4),
    ),
)
def test_equal_gradients_make_equal_bits_however_a_model_is_divided(
    ranks: Ranks, tmp_path: Path, name: str, stage: int, world_size: int
) -> None:
    first, *others = ranks(_divided, name, stage, str(tmp_path), world_size=world_size)
    for other in others:
        assert_same_bits(other, first)


def _through_layouts(rank: int, layouts: list[tuple[int, int, str]], folder: str) -> None:
    saved: dict[str, Tensor] = {}
    for number, (tp, stage, device) in enumerate(layouts):
        engine = _engine("Muon", stage, tp, device, folder)
        if number:
            engine.load_checkpoint(folder, tag=f"number{number - 1}")
            assert_same_bits(dict(_values(engine, "Muon")), saved)
        else:
            train(engine, loss_of_tokens, token_batches(), tp=tp)
        saved = dict(_values(engine, "Muon"))
        engine.save_checkpoint(folder, tag=f"number{number}")
        engine.destroy()


def test_momentum_goes_from_any_layout_to_any_other(ranks: Ranks, tmp_path: Path) -> None:
    layouts = [(2, 1, "cpu"), (1, 3, "none"), (2, 2, "nvme"), (1, 1, "cpu"), (2, 3, "none")]
    ranks(_through_layouts, layouts, str(tmp_path), world_size=4)

"""A rank that runs out of its GPU's memory says what it held, and what to change first."""

from __future__ import annotations

import gc
import io
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime import errors
from dslaunch.runtime.metrics import device_memory
from tests.fake_cuda.torch_cuda import device
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks

WIDTH, DEPTH = 128, 8
BLOCK = WIDTH * WIDTH  # elements of a unit
MIB = 2**20
BATCH_SIZE = 1024  # for which there is no room
PINNED = {"device": "cpu", "pin_memory": True}


class Wide(nn.Module):
    """Blocks without bias, so that sizes are round."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _told(rank: int, stage: int, zero: dict[str, Any]) -> str:
    """What is written after the traceback of a step that does not fit."""
    gc.collect()  # engines of tests before; one that a thread still holds counts neither
    device_memory._MODELS.clear()
    config = make_config(stage=stage, bf16={"enabled": True}, reduce_bucket_size=BLOCK)
    config["zero_optimization"].update(zero)
    engine, *_ = dslaunch.initialize(model=Wide(), config=config)
    own = torch.ones(8, WIDTH, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(own).float().pow(2).mean())
    engine.step()
    torch.cuda.empty_cache()
    before = device().capacity(rank)
    device().set_capacity(rank, torch.cuda.memory_reserved() + MIB // 2)
    try:
        engine(torch.ones(BATCH_SIZE, WIDTH, dtype=torch.bfloat16, device=engine.device)).float().sum()
    except torch.OutOfMemoryError as error:
        with pytest.MonkeyPatch.context() as patch:
            said = io.StringIO()
            patch.setattr(sys, "__stderr__", said)
            patch.setattr(sys, "stderr", io.StringIO())
            sys.excepthook(type(error), error, error.__traceback__)
        return said.getvalue()
    finally:
        device().set_capacity(rank, before)
        engine.destroy()
    raise AssertionError("there was room")


def sizes_of(text: str) -> dict[str, float]:
    """MiB by kind."""
    rows = re.findall(r"^dslaunch:   (\S.*?) {2,}([0-9.]+) MiB$", text, flags=re.MULTILINE)
    return {kind: float(size) for kind, size in rows}


N = BLOCK * DEPTH / MIB  # elements of the model, in 2**20


@pytest.mark.parametrize(
    ("stage", "zero", "params", "grads", "states", "advice"),
    [
        (0, {}, 2 * N, 2 * N, 12 * N, "zero_optimization.stage 1"),
        (1, {}, 2 * N, 2 * N, 12 * N / 2, "zero_optimization.offload_optimizer"),
        (3, {}, 2 * N / 2, 4 * N / 2, 12 * N / 2, ""),
        (2, {"offload_optimizer": PINNED}, 2 * N, 0.0, 0.0, ""),
        (
            *(3, {"offload_param": PINNED, "offload_optimizer": PINNED}, 0.0, 0.0, 0.0),
            "train_micro_batch_size_per_gpu",
        ),
    ],
)
def test_what_a_rank_held_is_told_by_kind_and_what_to_change_first_is_about_what_takes_most(
    cuda_ranks: Ranks,
    stage: int,
    zero: dict[str, Any],
    params: float,
    grads: float,
    states: float,
    advice: str,
) -> None:
    for rank, text in enumerate(cuda_ranks(_told, stage, zero, world_size=2)):
        assert f"dslaunch: rank {rank} ran out of memory on GPU {rank}, which has " in text
        found = sizes_of(text)
        assert found["parameters"] == pytest.approx(params, abs=0.03)
        assert found["gradients"] == pytest.approx(grads, abs=0.03)
        assert found["masters and optimizer states"] == pytest.approx(states, abs=0.03)
        last = text.splitlines()[-1]
        assert last.startswith("dslaunch: what to change first: ") or not advice
        assert advice in last


class _OfATest(Exception):
    """An error that is explained."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("of a program"), ""),
        (
            _OfATest("of a program"),
            "dslaunch: more cannot be said about it: ZeroDivisionError: division by zero\n",
        ),
    ],
)
def test_an_error_that_cannot_be_explained_is_told_as_ever(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    said, traceback = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", said)
    monkeypatch.setattr(sys, "stderr", traceback)
    monkeypatch.setattr(errors, "_EXPLANATIONS", {})
    errors.explain(_OfATest, lambda: str(1 / 0))
    errors._show(type(error), error, None)
    assert said.getvalue() == told
    assert "of a program" in traceback.getvalue()

"""Tensors without values that a program saves, pickles and copies by itself."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dslaunch

from .test_api import PLAIN

WIDTH = 512
NUM_BYTES = WIDTH * WIDTH * 4

State = dict[str, torch.Tensor]


def by_torch(state: State, folder: Path) -> State:
    torch.save(state, folder / "model.pt")
    assert os.path.getsize(folder / "model.pt") < NUM_BYTES // 10
    loaded: State = torch.load(folder / "model.pt", map_location="cpu")
    return loaded


def by_safetensors(state: State, folder: Path) -> State:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, folder / "model.safetensors", {"format": "pt"})
    assert os.stat(folder / "model.safetensors").st_blocks * 512 < NUM_BYTES // 10
    loaded: State = safetensors.load_file(folder / "model.safetensors")
    return loaded


def by_pickle(state: State, folder: Path) -> State:
    loaded: State = pickle.loads(pickle.dumps(state))
    return loaded


def by_copy(state: State, folder: Path) -> State:
    return copy.deepcopy(state)


def by_shared_memory(state: State, folder: Path) -> State:
    return {name: one.share_memory_() for name, one in state.items()}


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.mean).sum()


@pytest.mark.parametrize("way", [by_torch, by_safetensors, by_pickle, by_copy, by_shared_memory])
def test_a_program_saves_and_copies_its_weights(way: Callable[[State, Path], State], tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = Summed()
        state = way(made.state_dict(), tmp_path)
        assert {name: one.shape for name, one in state.items()} == {
            name: one.shape for name, one in made.state_dict().items()
        }
        made.load_state_dict(state)
        return copy.deepcopy(made)

    found = dslaunch.plan(model, lambda: torch.ones(1, WIDTH), PLAIN)
    assert found.kinds["parameters"] == pytest.approx(NUM_BYTES, rel=0.02)


def test_a_file_that_is_there_stays_as_it_is_where_nothing_holds_it_back(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_text("of a run")

    def model() -> Any:
        made = Summed()
        torch.save(made.state_dict(), path)
        return made

    dslaunch.plan(model, lambda: torch.ones(1, WIDTH), PLAIN)
    assert path.read_text() == "of a run"

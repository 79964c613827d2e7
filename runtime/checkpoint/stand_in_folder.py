"""Folders that stand for a snapshot in memory: for programs that can go on from a folder only."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import torch

_MARK = "dslaunch-snapshot"  # file with the snapshot's tag


def make_stand_in(folder: Path, tag: str, step: int) -> None:
    """Make a folder that looks like one with a checkpoint of this step. Errors: OSError"""
    (folder / f"global_step{step}").mkdir(parents=True)
    (folder / _MARK).write_text(tag)


def stands_for(folder: str | Path) -> str | None:
    """Return the tag of the snapshot that this folder stands for; None if it is a folder like others."""
    path = os.path.join(str(folder), _MARK)
    return Path(path).read_text() if os.path.isfile(path) else None


def write_rng_state(folder: str | Path, *, rank: int, world_size: int) -> None:
    """Write the states of this process's generators there, as transformers' Trainer reads them."""
    numpy = sys.modules.get("numpy")
    state = {
        "python": random.getstate(),
        "cpu": torch.random.get_rng_state(),
        "numpy": None if numpy is None else numpy.random.get_state(),
    }
    if torch.cuda.is_available():
        is_many = world_size > 1
        state["cuda"] = (
            torch.cuda.random.get_rng_state_all() if is_many else torch.cuda.random.get_rng_state()
        )
    name = f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"
    torch.save(state, Path(folder) / name)

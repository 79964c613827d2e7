"""One rank of bench_recovery.py that trains with dslaunch: see recovery_worker.py.

Its imports stand at the top, as those of a user's program do: a job that starts again shares them.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import dslaunch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recovery_worker import FOLDER, LIMIT_S, ROWS, Notes, model_and_rows, train


class Ours:
    def __init__(self, notes: Notes) -> None:
        _ = torch.Tensor, dslaunch.initialize  # which loads the rest
        notes.note("imported")
        dslaunch.init_distributed(timeout=timedelta(seconds=LIMIT_S))
        notes.note("groups")
        model, self._rows = model_and_rows()
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 0},
        }
        engine, *_ = dslaunch.initialize(model=model, model_parameters=model.parameters(), config=config)
        self._engine: Any = engine

    @property
    def step(self) -> int:
        return int(self._engine.global_steps)

    def load(self) -> None:
        self._engine.resume(FOLDER)

    def train(self) -> None:
        self._engine.backward(self._engine(self._rows).square().mean())
        self._engine.step()

    def save(self) -> None:
        self._engine.save_checkpoint(str(FOLDER))


if __name__ == "__main__":
    train(Ours)

"""One rank of soak.py: trains in small steps at one ZeRO stage after the other, and notes losses and times.

python soak_worker.py [STEPS]      in the folder of the run; without STEPS until there is a file `end`

Each attempt trains at another stage, and every second one saves beside training: what one attempt leaves, the
next one loads in another layout. The model is linear, so that what sums round off stays as small as it is.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import dslaunch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recovery_worker import FOLDER, Notes

WIDTH, OUT, BATCH, NUM_BATCHES = 512, 128, 24, 50
SAVE_EVERY = 20  # steps
STEP_S = 0.03  # what a step takes at least: small hosts would spend all of it on sending otherwise
GROUP_S = 120.0  # limit of a collective: --hang_limit comes before it


def make_engine(attempt: int) -> tuple[Any, Any]:
    """Return an engine, and its loader of data that all ranks make alike."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(BATCH * NUM_BATCHES, WIDTH)
    targets = inputs @ torch.randn(WIDTH, OUT) / WIDTH**0.5 + torch.randn(BATCH * NUM_BATCHES, OUT)
    model = torch.nn.Linear(WIDTH, OUT)
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": attempt % 4},
        "checkpoint": {"async_save": attempt % 2 == 1, "keep_last": 2},
    }
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    engine, _, loader, _ = dslaunch.initialize(
        model=model, model_parameters=model.parameters(), training_data=dataset, config=config
    )
    return engine, loader


def main(num_steps: int | None) -> None:
    """Train on from what there is."""
    notes = Notes()
    attempt = int(os.environ["MASTER_PORT"])  # which is another one for each
    notes.note("attempt", attempt=attempt)
    dslaunch.init_distributed(timeout=timedelta(seconds=GROUP_S))
    engine, loader = make_engine(attempt)
    state = {"steps": 0}  # what the program itself keeps
    state.update(engine.resume(str(FOLDER), client_state=lambda: dict(state)))
    if state["steps"] != engine.global_steps:
        raise RuntimeError(f"the program's state is of step {state['steps']}, not {engine.global_steps}")
    notes.note("loaded", step=engine.global_steps, rank=engine.global_rank)
    while True:
        for rows, targets in loader:
            notes.note("step begins", step=engine.global_steps)
            time.sleep(0.0 if num_steps else STEP_S)
            loss = (engine(rows) - targets).square().mean()
            engine.backward(loss)
            state["steps"] += 1
            engine.step()
            is_over = Path("end").exists() or engine.global_steps == num_steps
            told = torch.tensor([loss.item() / engine.world_size, float(is_over)], dtype=torch.float64)
            dslaunch.comm.all_reduce(told)
            notes.note("step", step=engine.global_steps, loss=told[0].item())
            if told[1]:
                return
            if num_steps is None and engine.global_steps % SAVE_EVERY == 0:
                notes.note("save begins", step=engine.global_steps)
                engine.save_checkpoint(str(FOLDER), client_state=dict(state))
                notes.note("saved", step=engine.global_steps)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)

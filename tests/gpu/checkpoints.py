"""Saving and loading from a GPU: how long training stands still, and how fast steps are meanwhile.

python -m tests.gpu.checkpoints
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch

import dslaunch

from .line import tell
from .model import GPT, MIDDLE, SMALL, Size, config, tokens


def main() -> None:
    """One line of JSON for each way to save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    size = SMALL if parser.parse_args().small else MIDDLE
    for is_async in (False, True):
        measure(size, is_async=is_async)


def measure(size: Size, *, is_async: bool) -> None:
    """What is loaded must have the bits of what was there at the save."""
    given = {**config(size, stage=2), "checkpoint": {"async_save": is_async}}
    engine, *_ = dslaunch.initialize(model=GPT(size), config=given)
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        ids = tokens(size, number)
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.backward(engine(ids))
        engine.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    before = [step() for _ in range(6)]
    expected = masters_of(engine)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        engine.save_checkpoint(folder)
        stall_s = time.perf_counter() - start
        meanwhile = [step() for _ in range(12)]
        engine._saver.wait()
        saved_s = time.perf_counter() - start
        start = time.perf_counter()
        engine.load_checkpoint(folder)
        load_s = time.perf_counter() - start
    same = all(torch.equal(now, was) for now, was in zip(masters_of(engine), expected, strict=True))
    engine.destroy()
    tell(
        "save beside training" if is_async else "save",
        right=same,
        stall_s=round(stall_s, 3),
        until_saved_s=round(saved_s, 3),
        load_s=round(load_s, 3),
        step_ms=round(statistics.median(before[2:]), 2),
        step_meanwhile_ms=round(statistics.median(meanwhile), 2),
    )


def masters_of(engine: dslaunch.Engine) -> list[torch.Tensor]:
    """Copies in host memory."""
    return [
        sub_buffer.optimizer_shard.master.detach().to("cpu", copy=True)
        for sub_buffer in engine._model.trained
    ]


if __name__ == "__main__":
    main()

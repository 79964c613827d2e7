"""One rank of bench_checkpoint.py: has a model and its AdamW trained by one tool, and saves and loads them.

python checkpoint_worker.py SHAPE TOOL      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

It reads lines, `ready` first and then `WHAT FOLDER`, and answers each with one of JSON. WHAT is save, async
or load.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import VOCABULARY, Gpt, Shape
from benchmarks.training_worker import ADAMW, Tool, config_of, engine_loop, engine_of, numel_of, shard_fully
from benchmarks.turn import bytes_of, serve, start_of_peak, timed

SHAPES = {
    "gigabyte": Shape(width=768, blocks=10, batch=1, sequence=32),  # 72 million parameters: 1.0 GB
    "small": Shape(width=256, blocks=8, batch=1, sequence=32),  # 6.6 million: 92 MB
}
TAG, READY = "tag", "ready"
CHUNK = 16 << 20


class Saver(Protocol):
    """The measured object."""

    def step(self, tokens: Tensor) -> object:
        """Train."""

    def save(self, folder: str) -> None:
        """Save, and return when all is on the disk."""

    def save_async(self, folder: str) -> Callable[[], object]:
        """Begin to save; return when training may go on, with a call that waits for the rest."""

    def load(self, folder: str) -> None:
        """Load all of it again."""


class _Engine:
    """dslaunch and DeepSpeed. `is_synced`: what it has saved is on the disk,
    and not only in the page cache.
    """

    def __init__(self, engine: Any, *, is_synced: bool) -> None:
        self._engine, self._is_synced = engine, is_synced
        self.step = engine_loop(engine)

    def save(self, folder: str) -> None:
        self._engine.save_checkpoint(folder, TAG)
        if not self._is_synced:
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            for path in files[dist.get_rank() :: dist.get_world_size()]:
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def save_async(self, folder: str) -> Callable[[], object]:
        engine = self._engine
        config = engine.settings
        wanted = config.checkpoint.model_copy(update={"async_save": True})
        engine.settings = config.model_copy(update={"checkpoint": wanted})
        engine.save_checkpoint(folder, TAG)
        engine.settings = config
        wait: Callable[[], object] = engine._saver.wait
        return wait

    def load(self, folder: str) -> None:
        self._engine.load_checkpoint(folder, TAG)


class _Fsdp2:
    """fully_shard and torch.distributed.checkpoint."""

    def __init__(self, model: Gpt) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        shard_fully(model, model.blocks, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        self._beside = dist.new_group()  # async_save's messages would get among those of training

    def step(self, tokens: Tensor) -> None:
        self._model(tokens).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: str) -> None:
        from torch.distributed.checkpoint import save

        save(self._state(), checkpoint_id=f"{folder}/{TAG}")

    def save_async(self, folder: str) -> Callable[[], object]:
        from torch.distributed.checkpoint import async_save

        future: Any = async_save(self._state(), checkpoint_id=f"{folder}/{TAG}", process_group=self._beside)
        wait: Callable[[], object] = future.result
        return wait

    def load(self, folder: str) -> None:
        from torch.distributed.checkpoint import load
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        load(state, checkpoint_id=f"{folder}/{TAG}")
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class _Raw:
    """Writer of as many bytes as a checkpoint of ours has, from memory that is there."""

    def __init__(self, model: Gpt) -> None:
        self._left = 14 * numel_of(model) // dist.get_world_size()
        self._chunk = memoryview(bytearray(os.urandom(CHUNK)))

    def step(self, tokens: Tensor) -> None:
        pass

    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with open(f"{folder}/{dist.get_rank()}", "wb", buffering=0) as file:
            for start in range(0, self._left, CHUNK):
                file.write(self._chunk[: min(CHUNK, self._left - start)])
            os.fsync(file.fileno())

    def save_async(self, folder: str) -> Callable[[], object]:
        raise NotImplementedError

    def load(self, folder: str) -> None:
        buffer = bytearray(CHUNK)
        with open(f"{folder}/{dist.get_rank()}", "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


RAW, UNIVERSAL = "raw write", ", universal"
HAS_ASYNC = ("dslaunch 2", "dslaunch 3", "FSDP2")


def saver_of(model: Gpt, text: str) -> Saver:
    """Return the tool's saver for the model."""
    if text == RAW:
        return _Raw(model)
    if text == "FSDP2":
        return _Fsdp2(model)
    tool = Tool.of(text)
    config = config_of(tool.stage, stage3_param_persistence_threshold=0) | {"bf16": {"enabled": True}}
    if tool.more:
        config["checkpoint"] = {"load_universal": True}
    return _Engine(engine_of(tool, model, config), is_synced=tool.name == "dslaunch")


class Turn(NamedTuple):
    """Times of one save or load."""

    s: float  # time until it is done on all ranks
    stall_s: float  # time that training waited, with the delay of its next step
    memory_bytes: float  # peak on this rank, beside training's memory


def take_turn(saver: Saver, what: str, folder: str, tokens: Tensor) -> Turn:
    for _ in range(2):
        saver.step(tokens)
    usual_s = min(timed(lambda: saver.step(tokens)) for _ in range(3))
    before = start_of_peak()
    if what == "async":
        dist.barrier()
        began = time.perf_counter()
        wait = saver.save_async(folder)
        called_s = time.perf_counter() - began
        next_s = timed(lambda: saver.step(tokens))
        wait()
        dist.barrier()
        took_s, stall_s = time.perf_counter() - began, called_s + max(0.0, next_s - usual_s)
    else:
        action = saver.save if what == "save" else saver.load
        took_s = stall_s = timed(lambda: action(folder))
    return Turn(took_s, stall_s, bytes_of("VmHWM") - before)


def main(shape: Shape, tool: str) -> None:
    def prepare() -> Callable[[int, str], Turn]:
        saver = saver_of(Gpt(shape), tool)
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(VOCABULARY, (shape.batch, shape.sequence), generator=generator)

        def answer(_: int, line: str) -> Turn:
            if line == READY:
                return Turn(timed(lambda: saver.step(tokens)), 0.0, 0.0)
            what, folder = line.split()
            return take_turn(saver, what, folder, tokens)

        return answer

    serve(prepare)


if __name__ == "__main__":
    main(SHAPES[sys.argv[1]], sys.argv[2])

"""One rank of bench_checkpoint.py: has a model and its AdamW trained by one tool, and saves and loads them.

python checkpoint_worker.py SHAPE TOOL      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

It reads lines `WHAT FOLDER` and answers each with one of JSON. WHAT is save, async or load.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Not by package: a worker starts from anywhere.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.zero_worker import ADAMW, VOCABULARY, Gpt, Shape

SHAPES = {
    "gigabyte": Shape(width=768, blocks=10, batch=1, sequence=32),  # 72 million parameters: 1.0 GB
    "small": Shape(width=256, blocks=8, batch=1, sequence=32),  # 6.6 million: 92 MB
}
TAG = "tag"
CHUNK = 16 << 20


class Tool(Protocol):
    """What is measured."""

    def step(self, tokens: Tensor) -> None:
        """Train."""

    def save(self, folder: str) -> None:
        """Return when it is on the disk."""

    def save_async(self, folder: str) -> Callable[[], object]:
        """Return when training may go on, with what waits for the rest."""

    def load(self, folder: str) -> None:
        """Have it all again."""


class _Engine:
    """dslaunch and DeepSpeed. `is_synced`: what it has saved is on the disk,
    and not only in the page cache.
    """

    def __init__(self, engine: Any, *, is_synced: bool) -> None:
        self._engine, self._is_synced = engine, is_synced

    def step(self, tokens: Tensor) -> None:
        self._engine.backward(self._engine(tokens))
        self._engine.step()

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
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
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
    """As many bytes as a checkpoint of ours, written from memory that is there."""

    def __init__(self, model: Gpt) -> None:
        numel = sum(param.numel() for param in model.parameters())
        self._left = 14 * numel // dist.get_world_size()
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


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def _dslaunch(stage: int) -> Callable[[Gpt], Tool]:
    def make(model: Gpt) -> Tool:
        import dslaunch

        config = {**_config(stage), "optimizer": {"type": "AdamW", "params": ADAMW}}
        return _Engine(dslaunch.initialize(model=model, config=config)[0], is_synced=True)

    return make


def _deepspeed(stage: int, *, is_universal: bool = False) -> Callable[[Gpt], Tool]:
    def make(model: Gpt) -> Tool:
        import deepspeed  # type: ignore[import-not-found]

        config = {**_config(stage), "zero_allow_untested_optimizer": True}
        if is_universal:
            config["checkpoint"] = {"load_universal": True}
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        return _Engine(
            deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0], is_synced=False
        )

    return make


TOOLS: dict[str, Callable[[Gpt], Tool]] = {
    "raw write": _Raw,
    **{f"dslaunch {stage}": _dslaunch(stage) for stage in (2, 3)},
    **{f"DeepSpeed {stage}": _deepspeed(stage) for stage in (2, 3)},
    "FSDP2": _Fsdp2,
    "DeepSpeed 2 universal": _deepspeed(2, is_universal=True),
}
HAS_ASYNC = ("dslaunch 2", "dslaunch 3", "FSDP2")


class Turn(NamedTuple):
    """What one save or load took."""

    s: float  # until it is done on all ranks
    stall_s: float  # that training waited, with what its next step took longer
    memory_bytes: float  # at most, on this rank, beside what training has


def take_turn(tool: Tool, what: str, folder: str, tokens: Tensor) -> Turn:
    for _ in range(2):
        tool.step(tokens)
    usual_s = min(_timed(lambda: tool.step(tokens)) for _ in range(3))
    before = _start_of_peak()
    if what == "async":
        dist.barrier()
        began = time.perf_counter()
        wait = tool.save_async(folder)
        called_s = time.perf_counter() - began
        next_s = _timed(lambda: tool.step(tokens))
        wait()
        dist.barrier()
        took_s, stall_s = time.perf_counter() - began, called_s + max(0.0, next_s - usual_s)
    else:
        action = tool.save if what == "save" else tool.load
        took_s = stall_s = _timed(lambda: action(folder))
    return Turn(took_s, stall_s, _bytes_of("VmHWM") - before)


def _timed(action: Callable[[], object]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def _start_of_peak() -> int:
    """Forget the peak of this process's memory; return what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _bytes_of("VmRSS")


def _bytes_of(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def main(shape: Shape, tool: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    answers, sys.stdout = sys.stdout, sys.stderr  # tools print
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    one = TOOLS[tool](Gpt(shape))
    tokens = torch.randint(
        VOCABULARY, (shape.batch, shape.sequence), generator=torch.Generator().manual_seed(rank)
    )
    one.step(tokens)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        what, folder = line.split()
        print(json.dumps(take_turn(one, what, folder, tokens)._asdict()), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(SHAPES[sys.argv[1]], sys.argv[2])

"""One rank of bench_offload.py: trains a GPT in bfloat16 with values in one place, and says what that took.

python offload_worker.py TURN      a `Turn` as JSON, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

Its last line is a `Taken` as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from benchmarks.zero_worker import VOCABULARY, Gpt, Shape  # noqa: E402

RESET_PEAK = "5"  # proc(5), clear_refs


class Turn(NamedTuple):
    """What is to be trained, and where its values lie."""

    width: int
    blocks: int
    sequence: int
    stage: int
    states: str  # offload_optimizer.device
    parameters: str  # offload_param.device
    num_micro_batches: int
    num_steps: int
    folder: str


class Taken(NamedTuple):
    """By rank 0. Bytes are those beside what the process had before the model was made."""

    s: float  # per step, the median
    loss: float  # of the last one
    peak_bytes: int  # of resident memory, during the steps
    formula_bytes: float
    disk_bytes: int
    disk_formula_bytes: float
    numel: int


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _config(turn: Turn, block_numel: int) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": turn.stage,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": block_numel,
        "stage3_prefetch_bucket_size": block_numel,
        "offload_optimizer": {"device": turn.states, "nvme_path": turn.folder},
    }
    if turn.stage == 3:
        zero["offload_param"] = {"device": turn.parameters, "nvme_path": turn.folder}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": turn.num_micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": zero,
    }


def _formula(engine: Any, turn: Turn) -> Any:
    from dslaunch.runtime.placement.stage_policy import policy_for_stage
    from tests.runtime.footprint import ModelSize, peak_bytes

    sub_buffers = engine.optimizer.sub_buffers
    return peak_bytes(
        policy_for_stage(turn.stage),
        engine._offload._plan,
        ModelSize(
            numel=sum(sub_buffer.layout.numel for sub_buffer in sub_buffers),
            unit_numel=max(sub_buffer.layout.numel for sub_buffer in sub_buffers),
            param_numel=max(
                member.param.numel() for sub_buffer in sub_buffers for member in sub_buffer.members
            ),
            param_bytes=2,
        ),
        num_ranks=dist.get_world_size(),
        is_accumulating=turn.num_micro_batches > 1,
        is_gpu=False,
    )


def _train_small(turn: Turn) -> None:
    """Have in memory what is there for a model of any size: libraries, threads, plans of matrix products."""
    import dslaunch

    model = Gpt(Shape(width=64, blocks=2, batch=1, sequence=turn.sequence))
    engine = dslaunch.initialize(model=model, config=_config(turn, 10**5))[0]
    for _ in range(2 * turn.num_micro_batches):
        engine.backward(engine(torch.zeros(1, turn.sequence, dtype=torch.int64)))
        engine.step()
    engine.destroy()
    del engine, model
    gc.collect()


def take(turn: Turn) -> Taken:
    import dslaunch

    dslaunch.init_distributed("gloo")
    _train_small(turn)
    torch.manual_seed(0)
    before = _status("VmRSS")
    model = Gpt(Shape(width=turn.width, blocks=turn.blocks, batch=1, sequence=turn.sequence))
    block_numel = sum(param.numel() for param in model.blocks[0].parameters())
    numel = sum(param.numel() for param in model.parameters())
    engine = dslaunch.initialize(model=model, config=_config(turn, block_numel))[0]
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> float:
        for _ in range(turn.num_micro_batches):
            tokens = torch.randint(VOCABULARY, (1, turn.sequence), generator=generator)
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
        return float(loss)

    for _ in range(2):  # until units come early and files are there
        step()
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    times = []
    for _ in range(turn.num_steps):
        dist.barrier()
        began = time.perf_counter()
        last = step()
        times.append(time.perf_counter() - began)
    formula = _formula(engine, turn)
    own = [path for path in Path(turn.folder).rglob("*") if path.is_file() and path.parent.name == "rank0"]
    taken = Taken(
        s=sorted(times)[len(times) // 2],
        loss=last,
        peak_bytes=_status("VmHWM") - before,
        formula_bytes=formula.device + formula.host,
        disk_bytes=sum(path.stat().st_blocks * 512 for path in own),
        disk_formula_bytes=formula.disk,
        numel=numel,
    )
    dist.barrier()
    engine.destroy()
    dist.destroy_process_group()
    return taken


def main() -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    print(json.dumps(take(Turn(**json.loads(sys.argv[1])))._asdict()))


if __name__ == "__main__":
    main()

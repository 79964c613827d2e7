"""One rank of bench_offload.py: trains a GPT in bfloat16 with values in one place, and answers the first line
that it reads with the cost, a `Taken` as JSON.

python offload_worker.py TURN      a `Turn` as JSON, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.models import ADAMW, VOCABULARY, Gpt, Shape
from benchmarks.training_worker import engine_loop, numel_of
from benchmarks.turn import bytes_of, serve, start_of_peak, timed


class Turn(NamedTuple):
    """The model to be trained, and the places of its values."""

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
    """Measurement by rank 0. Bytes are those beside the process's memory before the model was made."""

    s: float  # median per step
    loss: float  # loss of the last step
    peak_bytes: int  # peak of resident memory, during the steps
    formula_bytes: float
    disk_bytes: int
    disk_formula_bytes: float
    numel: int


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
        "optimizer": {"type": "AdamW", "params": ADAMW},
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
    step = engine_loop(engine)
    for _ in range(2 * turn.num_micro_batches):
        step(torch.zeros(1, turn.sequence, dtype=torch.int64))
    engine.destroy()
    del engine, model, step
    gc.collect()


def take(turn: Turn) -> Taken:
    import dslaunch

    _train_small(turn)
    torch.manual_seed(0)
    before = bytes_of("VmRSS")
    model = Gpt(Shape(width=turn.width, blocks=turn.blocks, batch=1, sequence=turn.sequence))
    numel = numel_of(model)
    engine = dslaunch.initialize(model=model, config=_config(turn, numel_of(model.blocks[0])))[0]
    micro_step = engine_loop(engine)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses: list[Any] = []

    def step() -> None:
        for _ in range(turn.num_micro_batches):
            tokens = torch.randint(VOCABULARY, (1, turn.sequence), generator=generator)
            losses.append(float(micro_step(tokens)))

    for _ in range(2):  # until units come early and files are there
        step()
    start_of_peak()
    times = [timed(step) for _ in range(turn.num_steps)]
    formula = _formula(engine, turn)
    own = [path for path in Path(turn.folder).rglob("*") if path.is_file() and path.parent.name == "rank0"]
    taken = Taken(
        s=statistics.median(times),
        loss=losses[-1],
        peak_bytes=bytes_of("VmHWM") - before,
        formula_bytes=formula.device + formula.host,
        disk_bytes=sum(path.stat().st_blocks * 512 for path in own),
        disk_formula_bytes=formula.disk,
        numel=numel,
    )
    dist.barrier()
    engine.destroy()
    return taken


if __name__ == "__main__":
    serve(lambda: lambda number, line: take(Turn(**json.loads(sys.argv[1]))))

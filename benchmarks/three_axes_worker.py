"""One rank of bench_parallel.py: trains blocks of a Transformer in two stages, each of whose layers are
divided over two ranks, and on the data of two such groups, as turn.py says.

python three_axes_worker.py SHAPE TOOL
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pipeline_worker import (
    ADAMW,
    MICRO,
    PP,
    Batch,
    Block,
    Shape,
    batches,
    config_of,
    layers,
    loss_of,
)
from benchmarks.turn import Step, serve

TP, DP = 2, 2
COLUMNS, ROWS = ("qkv", "up"), ("out", "down")
SHAPES = {
    "few tokens": Shape(width=384, blocks=6, batch=1, sequence=32),
    "many tokens": Shape(width=256, blocks=6, batch=2, sequence=128),
}


def _dslaunch(stage: int, shape: Shape) -> Step:
    import dslaunch
    from dslaunch.runtime.pipeline.topology import PipeModelDataParallelTopology

    rules = [
        {"patterns": [rf".*\.({'|'.join(names)})\.weight$"], "partition_type": kind}
        for kind, names in (("column", COLUMNS), ("row", ROWS))
    ]
    config = {
        **config_of(stage),
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "tensor_parallel": {"autotp_size": TP, "partition_config": {"layer_specs": rules}},
    }
    module = dslaunch.PipelineModule(
        layers(shape),
        topology=PipeModelDataParallelTopology(num_pp=PP, num_mp=TP, num_dp=DP),
        loss_fn=loss_of,
        partition_method="uniform",
    )
    engine = dslaunch.initialize(model=module, config=config)[0]
    return lambda batch: engine.train_batch(iter(batch)).item()


def _torch(shape: Shape) -> Step:
    """Its stages, styles and fully_shard(), put together as torchtitan does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (PP, DP, TP), mesh_dim_names=("pp", "dp", "tp"))
    place, every = mesh["pp"].get_local_rank(), layers(shape)
    half = len(every) // PP
    module = nn.Sequential(*every[place * half : (place + 1) * half])
    for block in module:
        if isinstance(block, Block):
            plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
            parallelize_module(block, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(module, place, PP, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False, **ADAMW)

    def step(batch: Batch) -> float:
        inputs, labels = (torch.cat(one) for one in zip(*batch, strict=True))
        losses: list[Tensor] = []
        if place == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(mean)
        return mean.item() / (DP * TP)

    return step


TOOLS: dict[str, Callable[[Shape], Step]] = {
    "torch": _torch,
    **{f"dslaunch {stage}": partial(_dslaunch, stage) for stage in (1, 3)},
}


def main(shape: Shape, tool: str) -> None:
    # The ranks of a group that computes together, neighbours, have the same samples, and so have both stages.
    place = int(os.environ["RANK"]) // TP % DP
    serve(lambda: TOOLS[tool](shape), partial(batches, shape, place))


if __name__ == "__main__":
    main(SHAPES[sys.argv[1]], sys.argv[2])

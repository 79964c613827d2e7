"""Several ranks over NCCL on one GPU: every stage and offload against plain torch in one process.

    python -m tests.gpu.nccl_ranks 2

NCCL refuses two ranks of one host on one GPU; each says that it is a host of its own (NCCL_HOSTID), and they
talk over the loopback network. That is for values, and not for times. A hang ends by DEEPSPEED_TIMEOUT.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import dslaunch
from tests.runtime.models import batch, loss_of, make_config, make_model, snapshot, worst_difference

CLIPPING, STEPS = 0.05, 4
HOST = {"device": "cpu", "pin_memory": True}
CASES: list[tuple[int, dict[str, Any]]] = [
    *((stage, {}) for stage in (0, 1, 2, 3)),
    (1, {"offload_optimizer": HOST}),
    (2, {"offload_optimizer": HOST}),
    (3, {"offload_optimizer": HOST, "offload_param": HOST}),
    (3, {"offload_param": {"device": "cpu", "pin_memory": False}}),
    (3, {"offload_optimizer": {**HOST, "super_offload": True}}),
]
WIDTH, ROWS, MICRO_BATCHES = 4096, 2048, 4
SMALL_WIDTH = 32
PIPELINE_TOLERANCE = 1e-3  # of two steps' losses; matrices of float32 may be multiplied in TF32
TOLERANCES = {
    torch.float32: 2e-6,
    torch.bfloat16: 4e-2,
}  # AdamW turns a rounding of a small gradient into a step


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", type=int)
    parser.add_argument("--limit-s", type=float, default=140)
    parser.add_argument("--first", action="store_true", help="no offload, and a pipeline")
    given = parser.parse_args()
    if "NCCL_HOSTID" in os.environ:
        sys.exit(be_a_rank(is_first=given.first))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **{"WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
        },
        **{"NCCL_NET": "Socket", "NCCL_MAX_NCHANNELS": "1", "NCCL_DEBUG": "WARN"},
        **{"DEEPSPEED_TIMEOUT": "1", "DSLAUNCH_WATCHDOG_S": "20", "CUDA_VISIBLE_DEVICES": "0"},
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.nccl_ranks", str(given.ranks), *["--first"] * given.first],
            env={
                **os.environ,
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NCCL_HOSTID": f"host{rank}",
            },
        )
        for rank in range(given.ranks)
    ]
    try:
        sys.exit(max(abs(rank.wait(timeout=given.limit_s)) for rank in ranks))
    finally:
        for rank in ranks:
            rank.kill()


def be_a_rank(*, is_first: bool) -> int:
    """Return how many cases came to other values, or other orders of collectives."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dslaunch.init_distributed()
    halves = world_size // 2
    meshes = (
        [(3, {"mics_shard_size": halves}), (3, {"zero_hpz_partition_size": halves})] if halves > 1 else []
    )
    expected = trained_by_torch()
    num_wrong = 0
    for dtype, tolerance in TOLERANCES.items():
        for stage, zero in CASES[:4] if is_first else CASES + meshes:
            start = time.perf_counter()
            values, order = trained(stage, zero, dtype)
            worst = worst_difference(values, expected)
            orders: list[Any] = [None] * world_size
            dist.all_gather_object(orders, order)
            is_right = worst < tolerance and len(set(orders)) == 1
            num_wrong += not is_right
            if rank == 0:
                name = f"{world_size} ranks, {str(dtype).removeprefix('torch.')}, stage {stage}" + "".join(
                    f", {key}" for key in zero
                )
                took = round(time.perf_counter() - start, 2)
                print(json.dumps({"name": name, "right": is_right, "worst": worst, "s": took}), flush=True)
    if is_first:
        is_fake = "tests.fake_cuda.torch_cuda" in sys.modules
        num_wrong += not pipeline_is_right(rank, width=SMALL_WIDTH if is_fake else WIDTH)
    dist.destroy_process_group()
    return num_wrong


def pipeline_is_right(rank: int, *, width: int) -> bool:
    """Train stages that hand on 32 MiB with WIDTH, and compare with all layers in one process."""
    start = time.perf_counter()
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(4)]
    judge = nn.Sequential(*copy.deepcopy(layers)).cuda()
    module = dslaunch.PipelineModule(layers, 2, loss_fn=functional.mse_loss)
    given = make_config(stage=1, optimizer={"type": "SGD", "params": {"lr": 0.5}})
    given |= {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICRO_BATCHES}
    given["train_batch_size"] = ROWS * MICRO_BATCHES
    engine, *_ = dslaunch.initialize(model=module, config=given)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.5)
    worst = 0.0
    for number in range(2):
        draw = torch.Generator().manual_seed(number)
        inputs = [torch.randn(ROWS, width, generator=draw).cuda() for _ in range(MICRO_BATCHES)]
        loss = float(engine.train_batch(iter([(one, one) for one in inputs])))
        optimizer.zero_grad()
        losses = [functional.mse_loss(judge(one), one) for one in inputs]
        torch.stack(losses).mean().backward()
        optimizer.step()
        expected = float(torch.stack(losses).mean().detach())
        worst = max(worst, abs(loss - expected) / expected)
    if rank == 0:
        took = round(time.perf_counter() - start, 2)
        told = {
            "name": f"2 ranks, 1f1b, {ROWS * width * 4 / 2**20:g} MiB",
            "right": worst < PIPELINE_TOLERANCE,
            "worst": worst,
            "s": took,
        }
        print(json.dumps(told), flush=True)
    engine.destroy()
    return worst < PIPELINE_TOLERANCE


def trained(stage: int, zero: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], Any]:
    """Parameters on the host after some steps, and the digest of the collectives' order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bf16 = {"enabled": dtype == torch.bfloat16}
    given = make_config(stage=stage, gradient_clipping=CLIPPING, reduce_bucket_size=100, bf16=bf16)
    given["zero_optimization"].update(zero)
    engine, *_ = dslaunch.initialize(model=make_model(), config=given)
    for number in range(STEPS):
        own = batch(number).chunk(world_size)[rank].cuda().to(dtype)
        engine.backward(loss_of(engine, own))
        engine.step()
    values = {name: value.float().cpu() for name, value in snapshot(engine.state_dict()).items()}
    order = engine.comm_order_hash()
    engine.destroy()
    return values, order


def trained_by_torch() -> dict[str, torch.Tensor]:
    """The same on whole batches, in float32."""
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(number).cuda()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
    return {name: value.detach().float().cpu() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    main()

"""Ranks over NCCL: what they train beside the same in one process.

    python -m tests.gpu.nccl_ranks [--second]

Where there are fewer GPUs than ranks they share one, see ONE_GPU of checks.py.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import dslaunch
from tests.runtime.models import batch, loss_of, make_config, make_model, snapshot, worst_difference
from tests.runtime.training.axes import Layout, Trained, make_engine, train, train_alone, values_of

from .checks import Check, is_fake, run_checks
from .line import tell

CLIPPING, STEPS = 0.05, 4
HOST = {"device": "cpu", "pin_memory": True}
OFFLOADED: list[tuple[int, dict[str, Any]]] = [
    (1, {"offload_optimizer": HOST}),
    (2, {"offload_optimizer": HOST}),
    (3, {"offload_optimizer": HOST, "offload_param": HOST}),
    (3, {"offload_param": {"device": "cpu", "pin_memory": False}}),
    (3, {"offload_optimizer": {**HOST, "super_offload": True}}),
]
STAGES: list[tuple[int, dict[str, Any]]] = [(stage, {}) for stage in (0, 1, 2, 3)]
TOLERANCES = {
    torch.float32: 2e-6,
    torch.bfloat16: 4e-2,
}  # AdamW turns a rounding of a small gradient into a step
LAYOUT_TOLERANCE = 2e-5  # float32 on a GPU beside float32 on a processor, after two steps
WIDTH, ROWS, SMALL_WIDTH = 4096, 2048, 32
MICRO_BATCHES = 6  # with 3 ranks more than there are ranks, so that some wait for others in both directions
LARGE_TOLERANCE = 1e-2  # of what SGD changes, which is small beside a parameter's own rounding
ASK_FOR_CONTEXTS = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]


def stages(dtype: torch.dtype, cases: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Train at each of them; all ranks must have asked for the same collectives in the same order."""
    rank, world_size = joined()
    expected = trained_by_torch()
    for stage, zero in cases:
        start = time.perf_counter()
        values, order = trained(stage, zero, dtype)
        worst = worst_difference(values, expected)
        orders: list[Any] = [None] * world_size
        dist.all_gather_object(orders, order)
        words = [f"{world_size} ranks", str(dtype).removeprefix("torch."), f"stage {stage}", *zero]
        is_right = worst < TOLERANCES[dtype] and len(set(orders)) == 1
        tell_first(rank, ", ".join(words), right=is_right, worst=worst, s=seconds_since(start))


def joined() -> tuple[int, int]:
    """Join the others; return this one's rank and their number. Without a GPU that would be over gloo."""
    torch.cuda.init()
    dslaunch.init_distributed()
    return dist.get_rank(), dist.get_world_size()


def seconds_since(start: float) -> float:
    return round(time.perf_counter() - start, 2)


def tell_first(rank: int, name: str, *, right: bool, **figures: Any) -> None:
    """All ranks must call this: what one of them finds wrong is wrong."""
    rights: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rights, right)
    if rank == 0:
        wrong = [number for number, one in enumerate(rights) if not one]
        tell(name, right=not wrong, **figures, **{"wrong_ranks": wrong} if wrong else {})


def trained(stage: int, zero: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], Any]:
    """Parameters on the host after some steps, and the digest of the collectives' order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bf16 = {"enabled": dtype == torch.bfloat16}
    given = make_config(stage=stage, gradient_clipping=CLIPPING, reduce_bucket_size=100, bf16=bf16)
    given["zero_optimization"].update(zero)
    engine, *_ = dslaunch.initialize(model=make_model(), config=given)
    for number in range(STEPS):
        step(engine, batch(number).chunk(world_size)[rank].cuda().to(dtype))
    values = on_host(engine)
    order = engine.comm_order_hash()
    engine.destroy()
    return values, order


def step(engine: dslaunch.Engine, own: Tensor) -> None:
    engine.backward(loss_of(engine, own))
    engine.step()


def on_host(engine: dslaunch.Engine) -> dict[str, Tensor]:
    """Whole parameters, in float32."""
    return {name: value.float().cpu() for name, value in snapshot(engine.state_dict()).items()}


def trained_by_torch() -> dict[str, Tensor]:
    """The same on whole batches, in float32."""
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(number).cuda()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
    return {name: value.detach().float().cpu() for name, value in model.state_dict().items()}


# ---- layers, sequences, experts and small stages over ranks


def layouts(*given: Layout) -> None:
    """Train each layout of the ranks beside one process."""
    rank, world_size = joined()
    for layout in given:
        start = time.perf_counter()
        engine = make_engine(layout)
        losses, norms = train(engine, layout)
        worst = worst_of((losses, norms, values_of(engine)), train_alone(layout))
        engine.destroy()
        name = f"{world_size} ranks, {layout}"
        tell_first(rank, name, right=worst < LAYOUT_TOLERANCE, worst=worst, s=seconds_since(start))


def worst_of(found: Trained, wanted: Trained) -> float:
    """Of losses and norms relative to themselves, of parameters the absolute difference."""
    numbers = [*zip(found[0], wanted[0], strict=True), *zip(found[1], wanted[1], strict=True)]
    return max(
        *(abs(one - other) / abs(other) for one, other in numbers),
        *(float((value.cpu() - wanted[2][name]).abs().max()) for name, value in found[2].items()),
    )


# ---- stages that hand on much


def large_stages(schedule: str) -> None:
    """Train stages that hand on ROWS x WIDTH numbers, and compare with all layers in one process."""
    rank, world_size = joined()
    start = time.perf_counter()
    width = SMALL_WIDTH if is_fake() else WIDTH
    with torch.device("cuda"):
        torch.manual_seed(0)
        layers = [nn.Linear(width, width) for _ in range(2 * world_size)]
    judge = nn.Sequential(*copy.deepcopy(layers))
    begun = {name: param.detach().clone() for name, param in judge.named_parameters()}
    module = dslaunch.PipelineModule(
        layers,
        world_size,
        loss_fn=functional.mse_loss,
        schedule=schedule,
        partition_method="uniform",
    )
    lr = width / 40  # of a mean over all elements
    given = make_config(stage=1, optimizer={"type": "SGD", "params": {"lr": lr}})
    given |= {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": MICRO_BATCHES}
    del given["train_batch_size"]
    engine, *_ = dslaunch.initialize(model=module, config=given)
    losses = []
    for number in range(2):
        inputs = inputs_of(number, width)
        loss = float(engine.train_batch(iter([(one, one) for one in inputs])))
        losses.append((loss, judged(judge, inputs, lr)))
    wanted = dict(judge.named_parameters())
    worst = max(
        *(abs(loss - other) / other for loss, other in losses),
        *(change_missed(value, wanted[name], begun[name]) for name, value in values_of(engine).items()),
    )
    engine.destroy()
    name = f"{world_size} ranks, {schedule}, messages of {ROWS * width * 4 / 2**20:g} MiB"
    tell_first(rank, name, right=worst < LARGE_TOLERANCE, worst=worst, s=seconds_since(start))


def inputs_of(number: int, width: int) -> list[Tensor]:
    torch.manual_seed(number)
    return [torch.randn(ROWS, width, device="cuda") for _ in range(MICRO_BATCHES)]


def judged(judge: nn.Module, inputs: Sequence[Tensor], lr: float) -> float:
    """Train a step in one process; return the loss."""
    judge.zero_grad()
    total = 0.0
    for one in inputs:
        loss = functional.mse_loss(judge(one), one) / len(inputs)
        loss.backward()
        total += loss.item()
    with torch.no_grad():
        for param in judge.parameters():
            assert param.grad is not None
            param -= lr * param.grad
    return total


def change_missed(value: Tensor, wanted: Tensor, begun: Tensor) -> float:
    """Return the difference as a part of how far the steps went."""
    return float((value - wanted.detach()).abs().max() / (wanted.detach() - begun).abs().max())


# ---- a save beside training


def save_beside_training() -> None:
    """What is loaded has the bits of what was there at the save, and each process has one context."""
    rank, world_size = joined()
    given = {**make_config(stage=2, reduce_bucket_size=100), "checkpoint": {"async_save": True}}
    engine, *_ = dslaunch.initialize(model=make_model(), config=given)
    own = [batch(number).chunk(world_size)[rank].cuda() for number in range(STEPS)]
    step(engine, own[0])
    expected = on_host(engine)
    with shared_folder() as folder:
        engine.save_checkpoint(folder)
        for one in own[1:]:
            step(engine, one)
        moved = worst_difference(on_host(engine), expected)
        engine.load_checkpoint(folder)
    worst = worst_difference(on_host(engine), expected)
    is_right = worst == 0 and moved > 0
    tell_first(rank, f"{world_size} ranks, save beside training", right=is_right, worst=worst)
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    found, text = contexts_of(pids) if rank == 0 else ({}, "")
    is_right = all(number == 1 for number in found.values())
    tell_first(
        rank, "contexts after a save", right=is_right, **{"by_pid": found} if found else {"said": text}
    )
    engine.destroy()


def contexts_of(pids: Sequence[int]) -> tuple[Mapping[int, int], str]:
    """Return how many GPUs these processes compute on, as the driver tells, or why it does not: in a
    container it may know them by other numbers.
    """
    if shutil.which(ASK_FOR_CONTEXTS[0]) is None:
        return {}, "no nvidia-smi"
    asked = subprocess.run(ASK_FOR_CONTEXTS, capture_output=True, text=True, check=False)
    lines = [line.split(",")[0].strip() for line in asked.stdout.splitlines()]
    found = {pid: lines.count(str(pid)) for pid in pids}
    if any(found.values()):
        return found, ""
    return {}, f"nvidia-smi names none of {list(pids)}: {asked.stdout}{asked.stderr}".strip()[:500]


@contextmanager
def shared_folder() -> Iterator[str]:
    """Rank 0's, which it removes."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    try:
        yield names[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(names[0])


FIRST = (
    Check("stages in float32", partial(stages, torch.float32, STAGES), 2, share=2),
    Check("stages in bfloat16", partial(stages, torch.bfloat16, STAGES), 2, share=1.5),
    Check("layers over ranks", partial(layouts, Layout(tp=2), Layout(tp=2, stage=3)), 2),
    Check("1f1b, large messages", partial(large_stages, "1f1b"), 2),
    Check("zero_bubble, small messages", partial(layouts, Layout(pp=3, schedule="zero_bubble")), 3),
    Check("zero_bubble, large messages", partial(large_stages, "zero_bubble"), 3, share=1.5),
    Check("experts over ranks", partial(layouts, Layout(dp=2, ep=2), Layout(dp=2, ep=2, stage=3)), 2),
    Check("sequences over ranks", partial(layouts, Layout(sp=2), Layout(sp=2, stage=3)), 2),
    Check("save beside training", save_beside_training, 2),
)
SECOND = (
    Check("offload in float32", partial(stages, torch.float32, OFFLOADED), 2),
    Check("offload in bfloat16", partial(stages, torch.bfloat16, OFFLOADED), 2),
)


def main() -> int:
    """Return how many checks failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--second", action="store_true", help="offload, and nothing else")
    return run_checks(SECOND if parser.parse_args().second else FIRST)


if __name__ == "__main__":
    sys.exit(main())

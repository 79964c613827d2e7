"""Speeds of a rank while all others work, too: `dslaunch check --bandwidth` starts this program on each slot.

It measures what a plan of a step computes with: arithmetic by dtype, operations that only move memory,
operations that do next to nothing, messages inside a host and between hosts as engines send them, copies
between host and GPU, the host's optimizer, and the disk of temporary files. Each rank prints one line of
JSON; a speed that cannot be measured is 0.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...kernels import AdamSegment, AdamShard, adamw_step
from ...kernels.disk import DiskEngine, DiskFile, aligned_empty
from ...shared import marks
from ..comm.collectives import Collectives
from ..comm.mesh import ALONE, Axis, Mesh
from ..comm.rank_group import RankGroup
from ..comm.wire import Wire

DEFAULT_S = 0.15  # each operation is repeated for so long
CROWDED_TIMES = 3  # as long, where ranks share cores and batches differ more
TIMEOUT = timedelta(minutes=2)  # a message may take so long
# Sides of square matrices, from those that memory holds up to those that arithmetic does.
CPU_SIDES, GPU_SIDES = (32, 64, 128, 256, 512, 1024), (128, 256, 512, 1024, 2048, 4096, 8192)
MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
LONG_S = 1.0  # a larger message that would take longer is not sent
NUM_BATCHES, MOST = 5, 50  # batches of one operation, and the most calls in each
NUM_OF_LONG = 2  # batches of an operation that alone takes longer than is meant for all
COPIED_BYTES = 64 << 20
DISK_BYTES = 32 << 20
NUM_UPDATED = 2 << 20  # parameters of the optimizer


def main(text: str) -> NoReturn:
    """Measure and tell. `text` is the number of seconds for each operation, at least."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo", timeout=TIMEOUT)
    told = {"rank": dist.get_rank(), **_Speeds(device, float(text)).measure()}
    sys.stdout.write(marks.SPEEDS + json.dumps(told) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


class _Speeds:
    """The measurements of one rank. All ranks measure the same at the same time."""

    def __init__(self, device: torch.device, enough_s: float) -> None:
        self._device = device
        num_threads = int(os.environ["LOCAL_WORLD_SIZE"]) * torch.get_num_threads()
        self._is_crowded = device.type == "cpu" and num_threads > len(os.sched_getaffinity(0))
        self._enough_s = (CROWDED_TIMES if self._is_crowded else 1) * enough_s

    def measure(self) -> dict[str, Any]:
        """Return all, in the form of launcher/fit/measured_speeds.py."""
        is_gpu = self._device.type == "cuda"
        dtypes = [torch.float32, torch.bfloat16, *([torch.float16] if is_gpu else [])]
        inside, between = self._axes()
        return {
            "device": torch.cuda.get_device_name(self._device) if is_gpu else "",
            "device_bytes": torch.cuda.get_device_properties(self._device).total_memory if is_gpu else 0,
            "torch": torch.__version__,
            "num_cores": len(os.sched_getaffinity(0)),
            "num_threads": torch.get_num_threads(),
            "arithmetic": {_name(dtype): self._arithmetic(dtype) for dtype in dtypes},
            "memory": {_name(dtype): self._memory(dtype) for dtype in dtypes},
            "launch_s": self._launch(),
            "inside": self._messages(inside),
            "between": self._messages(between),
            "update_bytes_per_s": self._update(),
            "copied_bytes_per_s": self._copies() if is_gpu else 0.0,
            "disk_bytes_per_s": self._disk(),
        }

    # ---- one rank's own work

    def _arithmetic(self, dtype: torch.dtype) -> list[tuple[float, float]]:
        """Return flops a second by flops for each byte."""
        found = []
        for side in GPU_SIDES if self._device.type == "cuda" else CPU_SIDES:
            left, right = (torch.randn(side, side, device=self._device).to(dtype) for _ in range(2))
            product = torch.empty_like(left)
            seconds = self._seconds(partial(torch.mm, left, right, out=product))
            found.append((2 * side / (3 * left.itemsize), 2 * side**3 / seconds))
        return found

    def _memory(self, dtype: torch.dtype) -> float:
        """Return the bytes a second that operations of a model without matrices read and write: those of a
        norm, an activation and a sum, forward and backward.
        """
        rows = 1 << (14 if self._device.type == "cuda" else 10)
        given = torch.randn(rows, 512, device=self._device, dtype=dtype, requires_grad=True)
        weight = torch.ones(512, device=self._device, dtype=dtype, requires_grad=True)

        def run() -> None:
            normed = functional.layer_norm(given, (512,), weight)
            (functional.gelu(normed) + given).sum().backward()  # type: ignore[no-untyped-call]
            given.grad = weight.grad = None

        counted = _Counted()
        with counted:
            run()
        return counted.num_bytes / self._seconds(run)

    def _launch(self) -> float:
        """Return the seconds of an operation of a model that computes next to nothing, with what Python,
        modules and autograd take.
        """
        layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))]
        model = nn.Sequential(*layers).to(self._device)
        given = torch.randn(4, 16, device=self._device)

        def run() -> None:
            model(given).sum().backward()

        counted = _Counted()
        with counted:
            run()
        return self._seconds(run) / counted.number

    def _update(self) -> float:
        """Return the bytes a second of the optimizer's kernel: each array counts as read and written."""
        param, grad, first, second = (torch.full((NUM_UPDATED,), 1e-3, device="cpu") for _ in range(4))
        segment = AdamSegment(
            offset=0, numel=NUM_UPDATED, lr=1e-3, weight_decay=0.0, beta1=0.9, beta2=0.99, eps=1e-8, step=1
        )
        shard = AdamShard(
            param=param, grads=[(0, grad)], exp_avg=first, exp_avg_sq=second, segments=[segment]
        )
        # Without the compiled module the host's optimizer cannot be used either.
        seconds = self._seconds_if_all_can(lambda: adamw_step([shard]))
        num_bytes = 2 * (param.nbytes + first.nbytes + second.nbytes)
        return num_bytes / seconds if seconds else 0.0

    def _copies(self) -> float:
        """Return the bytes a second of copies to the GPU and back."""
        host = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=self._device)

        def run() -> None:
            there.copy_(host, non_blocking=True)
            host.copy_(there, non_blocking=True)

        return 2 * COPIED_BYTES / self._seconds(run)

    def _disk(self) -> float:
        """Return the bytes a second of files in the folder of temporary files, past the page cache."""
        folder = Path(tempfile.mkdtemp(prefix="dslaunch-speeds-"))
        opened: list[tuple[DiskEngine, DiskFile, Tensor]] = []

        def run() -> None:
            if not opened:
                array = torch.from_dlpack(aligned_empty(DISK_BYTES)).fill_(1)  # type: ignore[attr-defined]
                engine = DiskEngine(is_quiet=True)
                opened.append((engine, engine.create(folder / "file", DISK_BYTES), array))
            ((_, file, array),) = opened
            file.write(array).wait()
            file.read(array).wait()

        seconds = self._seconds_if_all_can(run)
        for engine, file, _ in opened:
            file.close()
            engine.close()
        shutil.rmtree(folder, ignore_errors=True)
        return 2 * DISK_BYTES / seconds if seconds else 0.0

    # ---- messages

    def _axes(self) -> tuple[Axis, Axis]:
        """Return the ranks of this host, and all ranks if there are other hosts; one alone where not."""
        rank, size = dist.get_rank(), dist.get_world_size()
        nodes: list[Any] = [None] * size
        dist.all_gather_object(nodes, os.environ.get("GROUP_RANK", "0"))
        inside = ALONE
        for node in dict.fromkeys(nodes):
            ranks = [one for one in range(size) if nodes[one] == node]
            group = dist.new_group(ranks)
            if rank in ranks and len(ranks) > 1:
                inside = Axis(size=len(ranks), index=ranks.index(rank), group=group)
        is_many = len(set(nodes)) > 1
        return inside, Axis(size=size, index=rank, group=None) if is_many else ALONE

    def _messages(self, axis: Axis) -> dict[str, list[tuple[float, float]]]:
        """Return by collective the seconds by the bytes that this rank sends."""
        found: dict[str, list[tuple[float, float]]] = {}
        is_alone = [False] * dist.get_world_size()
        dist.all_gather_object(is_alone, axis.is_alone)
        if all(is_alone):
            return found
        for name, send in _collectives(axis).items():
            for num_bytes in MESSAGE_BYTES[:1] if name == "scalar" else MESSAGE_BYTES:
                numel = num_bytes // 4 // axis.size * axis.size
                flat = torch.ones(numel, device=self._device)
                seconds = self._seconds(partial(send, flat), is_message=True)
                times = 2 if name == "all_reduce" else 1
                found.setdefault(name, []).append(
                    (times * flat.nbytes * (axis.size - 1) / axis.size, seconds)
                )
                if seconds * MESSAGE_BYTES[1] / MESSAGE_BYTES[0] > LONG_S:
                    break
        return {} if axis.is_alone else found

    # ---- time

    def _seconds(self, run: Callable[[], object], *, is_message: bool = False) -> float:
        """Return the seconds of one call, with all ranks at it: those of the best of some batches, since what
        else a host does makes others slower; of the middle one where ranks share cores, since a rank has one
        to itself only by luck. Messages are called as often on all ranks.
        """
        run()
        self._synchronize()
        began = time.perf_counter()
        run()
        self._synchronize()
        once_s = self._slowest(time.perf_counter() - began)  # the ranks begin together behind it
        number = max(1, min(MOST, int(self._enough_s / max(once_s, 1e-9) / NUM_BATCHES)))
        times = []
        for _ in range(NUM_BATCHES if once_s < self._enough_s else NUM_OF_LONG):
            began = time.perf_counter()
            for _ in range(number):
                run()
            self._synchronize()
            times.append((time.perf_counter() - began) / number)
        found = median(times) if self._is_crowded else min(times)
        return self._slowest(found) if is_message else found

    def _seconds_if_all_can(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call; 0 if it fails on a rank, which leaves all of them without."""
        try:
            run()
            fails = 0.0
        except (OSError, ImportError):
            fails = 1.0
        return 0.0 if self._slowest(fails) else self._seconds(run)

    def _slowest(self, seconds: float) -> float:
        told = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return float(told.item())

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _collectives(axis: Axis) -> dict[str, Callable[[Tensor], object]]:
    """Return what an engine sends along an axis, each as a call that waits for its end."""
    wire = Wire()
    sharded = Collectives(Mesh(replicate=ALONE, shard=axis, sharers=axis), wire)
    replicated = Collectives(Mesh(replicate=axis, shard=ALONE, sharers=axis), wire)
    numbers = RankGroup(axis, wire)

    def gather_numbers(flat: Tensor) -> None:
        numbers.all_gather_numbers([0.0], device=flat.device, what="numbers")

    return {
        "all_gather": lambda flat: sharded.all_gather_(flat, what="speeds").wait(),
        "reduce_scatter": lambda flat: sharded.reduce_scatter_or_all_reduce(flat, what="speeds").wait(),
        "all_reduce": lambda flat: replicated.reduce_scatter_or_all_reduce(flat, what="speeds").wait(),
        "scalar": gather_numbers,
    }


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that compute, and the bytes that they read and write, as a rehearsal does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.number += 1
            tensors = (one for one in tree_leaves((args, kwargs, result)) if isinstance(one, Tensor))
            self.num_bytes += sum(one.nbytes for one in tensors)
        return result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(DEFAULT_S))

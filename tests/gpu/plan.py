"""What is asked of a machine with one GPU: one part of less than four minutes that answers most, and three of
less than ten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PARTS = ("first", "works", "speed", "scale")


class Step(NamedTuple):
    """One command. `argv` comes after `python -m`; on the fake device `small` follows."""

    part: str
    name: str
    asks: str
    limit_s: int
    argv: tuple[str, ...]
    small: tuple[str, ...] = ("--small",)
    environ: Mapping[str, str] = {}
    has_peer: bool = False  # a tool that is not ours, whose failure is not ours either
    only_real: str = ""  # why the fake device cannot answer it


_PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--timeout", "240", "-n", "8")
_GPU_TESTS = (
    "tests/runtime/training/test_gpu.py",
    "tests/runtime/engine/test_offload_states.py",
    "tests/runtime/compat/accelerator/test_accelerator.py",
)
# CUDA graphs, which the fake device does not capture
_WITH_GRAPHS = "tests/runtime/compat/accelerator/test_accelerator.py::test_a_gpu_is_asked_by_the_same_names"
ON_FAKE = ("-n", "2", "--deselect", _WITH_GRAPHS)
_EDGES = "unaligned or segments or ordinary or factor or exact"
OWN = {"DSLAUNCH_CUDA_KERNELS": "1"}

PLAN = (
    Step(
        *("first", "ranks", "two ranks over NCCL at every stage, and a pipeline", 75),
        ("tests.gpu.nccl_ranks", "2", "--first", "--limit-s", "70"),
        (),
    ),
    Step(
        *("first", "speed", "steps beside torch, FSDP2 and DeepSpeed", 80),
        ("tests.gpu.speed", "--first", "torch", "dslaunch:0", "dslaunch:0:own", "fsdp2", "dslaunch:2:cpu"),
    ),
    Step(
        *("first", "deepspeed", "DeepSpeed's step", 25, ("tests.gpu.speed", "--first", "deepspeed:1")),
        has_peer=True,
    ),
    Step(
        *("first", "kernel-speed", "GB/s of the optimizer's kernels", 20),
        ("tests.benchmarks.bench_cuda_kernels", "--first"),
        only_real="the fake device runs no CUDA code",
    ),
    Step(
        *("first", "kernels", "have the kernels the bits of the CPU's at the edges", 30),
        (*_PYTEST[:-2], "tests/kernels/cuda/test_device.py", "-k", _EDGES),
        only_real="the fake device runs no CUDA code",
    ),
    Step("first", "waits", "where does the host wait for the GPU", 20, ("tests.gpu.host_waits", "--first")),
    Step("works", "training", "does it train as plain torch does", 170, (*_PYTEST, *_GPU_TESTS), ON_FAKE),
    Step(
        *("works", "kernels", "have the kernels the bits of the CPU's", 110),
        (*_PYTEST, "tests/kernels/cuda/test_device.py", "tests/kernels/test_bindings.py"),
        only_real="the fake device runs no CUDA code",
    ),
    Step(
        "works",
        "ranks",
        "two ranks over NCCL at every stage and offload",
        150,
        ("tests.gpu.nccl_ranks", "2"),
        (),
    ),
    Step(
        *("works", "races", "does torch's detector see a race", 50, ("tests.gpu.races",), ()),
        environ={"TORCH_CUDA_SANITIZER": "1"},
    ),
    Step("works", "waits", "where does the host wait for the GPU", 40, ("tests.gpu.host_waits",)),
    Step(
        *(
            "works",
            "kernel-speed",
            "GB/s of the optimizer's kernels",
            60,
            ("tests.benchmarks.bench_cuda_kernels",),
        ),
        only_real="the fake device runs no CUDA code",
    ),
    Step("speed", "plain", "a step of plain torch", 60, ("tests.gpu.speed", "torch")),
    Step("speed", "stage 0", "ours on one GPU", 60, ("tests.gpu.speed", "dslaunch:0")),
    Step(
        *("speed", "stage 0, own kernels", "ours with our kernels", 60, ("tests.gpu.speed", "dslaunch:0")),
        environ=OWN,
        only_real="the fake device runs no CUDA code",
    ),
    Step("speed", "fsdp2", "FSDP2's", 60, ("tests.gpu.speed", "fsdp2"), has_peer=True),
    Step(
        *("speed", "deepspeed", "DeepSpeed's", 90, ("tests.gpu.speed", "deepspeed:1", "deepspeed:2")),
        has_peer=True,
    ),
    Step(
        *("speed", "offload", "ours with the optimizer or the parameters in host memory", 130),
        (
            *("tests.gpu.speed", "dslaunch:2:cpu", "dslaunch:2:cpu:pageable", "dslaunch:2:cpu:super"),
            *("dslaunch:2:cpu:delayed", "dslaunch:3:params"),
        ),
    ),
    Step(
        *("speed", "deepspeed offload", "DeepSpeed's with the optimizer in host memory", 90),
        ("tests.gpu.speed", "deepspeed:2:cpu"),
        has_peer=True,
    ),
    Step("scale", "memory", "bytes of rank 0 of 8 beside the formula", 120, ("tests.gpu.one_of_eight",)),
    Step(
        "scale",
        "four ranks",
        "four ranks over NCCL, hybrid meshes too",
        150,
        ("tests.gpu.nccl_ranks", "4"),
        (),
    ),
    Step("scale", "launched", "forked workers, and check --gpu", 60, ("tests.gpu.launched",)),
    Step("scale", "checkpoints", "saving beside training", 90, ("tests.gpu.checkpoints",)),
    Step(
        *("scale", "compile", "with torch.compile", 90, ("tests.gpu.speed", "dslaunch:0:compile")),
        only_real="torch.compile has no code for the fake device",
    ),
    Step(
        *("scale", "profile", "what a step spends its time on", 60),
        ("tests.gpu.speed", "--profile", "dslaunch:0", "dslaunch:2:cpu"),
    ),
)

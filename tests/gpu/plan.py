"""What is asked of a machine with a GPU: first what answers most, then the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# The longest that a part may take, in seconds.
PARTS: Mapping[str, int] = {"first": 230, "second": 300}


class Step(NamedTuple):
    """One command. `argv` comes after `python -m`; on the fake device `small` follows."""

    part: str
    name: str
    asks: str
    limit_s: float
    argv: tuple[str, ...]
    small: tuple[str, ...] = ()
    environ: Mapping[str, str] = {}
    beside: bool = False  # the next step: it takes none of the part's time
    only_real: str = ""  # why the fake device cannot answer it


NO_CODE = "the fake device runs no CUDA code"
SMALL = ("--small",)
FEW_THREADS = {"OMP_NUM_THREADS": "2"}  # several processes compute at once
_PLUGINS = ("-p", "no:cacheprovider", "-p", "tests.gpu.needs_gpu")
_PYTEST = ("pytest", "-q", *_PLUGINS, "--timeout", "60", "-n", "8", "-m", "gpu")
_GPU_TESTS = (
    "tests/runtime/training/test_gpu.py",
    "tests/runtime/engine/test_offload_states.py",
    "tests/runtime/compat/accelerator/test_accelerator.py",
)
# CUDA graphs, which the fake device does not capture
_WITH_GRAPHS = "tests/runtime/compat/accelerator/test_accelerator.py::test_a_gpu_is_asked_by_the_same_names"
ON_FAKE = ("-n", "2", "--deselect", _WITH_GRAPHS)
_KERNELS = "tests/kernels/cuda/test_device.py"
# one test of 2^31 elements: two at once are short of memory
_EDGES = "unaligned or segments or ordinary or factor or exact or step_of_more_than_2_to_the_31"

PLAN = (
    Step("first", "setup", "which machine, which versions", 10, ("tests.gpu.machine",)),
    Step(
        *(
            "first",
            "deepspeed",
            "compile its optimizer for GPUs",
            70,
            ("tests.gpu.deepspeed_op", "fused_adam"),
        ),
        beside=True,
        only_real=NO_CODE,
    ),
    Step(
        *("first", "ranks", "ranks over NCCL beside one process, in each direction", 70),
        ("tests.gpu.nccl_ranks",),
        environ=FEW_THREADS,
    ),
    Step(
        *("first", "speed", "steps of a GPT beside torch, FSDP2 and DeepSpeed", 90),
        (
            *("tests.gpu.speed", "torch", "dslaunch:0", "dslaunch:0:own", "fsdp2", "dslaunch:2:cpu"),
            "deepspeed:1",
        ),
        SMALL,
    ),
    Step(
        *("first", "kernel-speed", "GB/s of the optimizer's kernels beside a copy", 15),
        ("benchmarks.bench_cuda_kernels", "--first"),
        only_real=NO_CODE,
    ),
    Step(
        *("first", "kernels", "have the kernels the bits of the CPU's at the edges", 30),
        (*_PYTEST, _KERNELS, "-k", _EDGES),
        environ=FEW_THREADS,
        only_real=NO_CODE,
    ),
    Step(
        *("first", "waits", "where does the host wait for the GPU", 15, ("tests.gpu.host_waits", "--first")),
        SMALL,
    ),
    Step("second", "setup", "which machine, which versions", 10, ("tests.gpu.machine",)),
    Step(
        *(
            "second",
            "deepspeed",
            "compile its optimizer for CPUs",
            65,
            ("tests.gpu.deepspeed_op", "cpu_adam"),
        ),
        beside=True,
        only_real=NO_CODE,
    ),
    Step(
        *(
            "second",
            "training",
            "does one GPU train as plain torch does",
            65,
            (*_PYTEST, *_GPU_TESTS),
            ON_FAKE,
        ),
        environ=FEW_THREADS,
    ),
    Step(
        *("second", "offload", "steps with the optimizer or the parameters in host memory", 55),
        (
            *("tests.gpu.speed", "dslaunch:2:cpu", "dslaunch:2:cpu:pageable", "dslaunch:2:cpu:super"),
            *("dslaunch:2:cpu:delayed", "dslaunch:3:params", "deepspeed:2:cpu"),
        ),
        SMALL,
    ),
    Step(
        *("second", "ranks", "ranks over NCCL with offload beside one process", 25),
        ("tests.gpu.nccl_ranks", "--second"),
        environ=FEW_THREADS,
    ),
    Step(
        *("second", "races", "does torch's detector see a race", 15, ("tests.gpu.races",)),
        environ={"TORCH_CUDA_SANITIZER": "1"},
    ),
    Step(
        *("second", "memory", "bytes of rank 0 of 8 beside the formula", 15, ("tests.gpu.one_of_eight",)),
        SMALL,
    ),
    Step("second", "launched", "forked workers, and check --gpu", 25, ("tests.gpu.launched",), SMALL),
    Step("second", "checkpoints", "saving beside training", 15, ("tests.gpu.checkpoints",), SMALL),
    Step(
        *(
            "second",
            "compile",
            "a few layers with torch.compile",
            30,
            ("tests.gpu.speed", "dslaunch:0:compile"),
        ),
        only_real="torch.compile has no code for the fake device",
    ),
    Step(
        *("second", "kernels", "have the kernels the bits of the CPU's elsewhere", 30),
        (*_PYTEST, _KERNELS, "tests/kernels/test_bindings.py", "-k", f"not ({_EDGES})"),
        environ=FEW_THREADS,
        only_real=NO_CODE,
    ),
    Step("second", "waits", "where else does the host wait", 15, ("tests.gpu.host_waits",), SMALL),
)

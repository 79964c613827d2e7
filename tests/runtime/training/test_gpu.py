"""One CUDA device: the engine trains there as plain torch does. Skipped where there is none.

Several ranks on one device, over NCCL: tests/gpu/nccl_ranks.py. What needs no true device: test_fake_cuda.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
PINNED, PAGEABLE = {"device": "cpu", "pin_memory": True}, {"device": "cpu", "pin_memory": False}
NVME = {"device": "nvme", "nvme_path": "FOLDER"}
# With one rank and all on the device, stages 0 to 3 are one path.
CASES: list[tuple[int, str, int, dict[str, Any]]] = [
    (0, "fp32", 1, {}),
    (0, "bf16", 2, {}),
    (0, "fp16", 2, {}),
    (3, "bf16", 1, {}),
    (1, "bf16", 2, {"offload_optimizer": PINNED}),
    (2, "bf16", 1, {"offload_optimizer": PAGEABLE}),
    (2, "fp16", 2, {"offload_optimizer": PINNED}),
    (2, "bf16", 1, {"offload_optimizer": NVME}),
    (3, "bf16", 2, {"offload_param": PINNED}),
    (3, "fp32", 1, {"offload_param": PAGEABLE}),
    (3, "bf16", 2, {"offload_param": PINNED, "offload_optimizer": PINNED}),
    (3, "bf16", 1, {"offload_param": NVME, "offload_optimizer": NVME}),
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
is_fake = torch.cuda.is_available() and torch.cuda.get_device_name().startswith("Fake")


def run_on_gpu(what: str, given: str, **environ: str) -> None:
    """In a process of its own: the device and NCCL stay with a process for good."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.training.on_gpu", what, given],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **environ,
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def name_of(value: object) -> str:
    """For the test's name."""
    if isinstance(value, dict):
        return " ".join(f"{key}={one['device']}{one.get('pin_memory', '')}" for key, one in value.items())
    return str(value)


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@pytest.mark.parametrize(("stage", "precision", "num_micro_batches", "zero"), CASES, ids=name_of)
def test_one_gpu_trains_as_plain_torch_does(
    stage: int, precision: str, num_micro_batches: int, zero: dict[str, Any]
) -> None:
    case = {"stage": stage, "precision": precision, "num_micro_batches": num_micro_batches, "zero": zero}
    run_on_gpu("train", json.dumps(case))


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@pytest.mark.skipif(is_fake, reason="the fake device runs no CUDA code")
@pytest.mark.parametrize(("precision", "num_micro_batches"), [("fp32", 1), ("bf16", 2), ("fp16", 1)])
def test_our_kernels_train_as_plain_torch_does(precision: str, num_micro_batches: int) -> None:
    case = {"stage": 0, "precision": precision, "num_micro_batches": num_micro_batches}
    run_on_gpu("train", json.dumps(case), DSLAUNCH_CUDA_KERNELS="1")


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_the_host_updates_beside_one_gpu_with_the_bits_it_should_have(stage: int) -> None:
    run_on_gpu("early", str(stage))

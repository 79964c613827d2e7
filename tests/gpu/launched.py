"""What the launcher does with GPUs: python -m tests.gpu.launched [--small]

Workers that are forked from one import of torch use the GPU as others do; `dslaunch check --gpu` measures.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from dslaunch.launcher.inputs.host import Host
from dslaunch.launcher.inputs.selection import Selected
from dslaunch.launcher.options import Options
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.run.measure import Unmeasured, measure_gpus

from .line import tell

WORKER = """\
import os
import torch
import torch.distributed as dist
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
ones = torch.ones(64, 64, device=device)
product = ones @ ones
dist.all_reduce(product)
torch.cuda.synchronize()
print("sum", product.sum().item(), "without CUDA in the parent", not torch.cuda._is_in_bad_fork(), flush=True)
dist.destroy_process_group()
"""
EXPECTED = "sum 262144.0 without CUDA in the parent True"
SPEEDS = ("flops_per_s", "copied_bytes_per_s", "loaded_bytes_per_s")


def main(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "worker.py").write_text(WORKER)
        command = [sys.executable, "-m", "dslaunch", "-q", "--launcher=local", "--num_gpus=1"]
        for preload in ("none", "torch"):
            ran = subprocess.run(
                [*command, f"--preload={preload}", "--no_local_rank", "worker.py"],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            is_right = ran.returncode == 0 and EXPECTED in ran.stdout
            tell(f"--preload {preload}", right=is_right, said=(ran.stdout + ran.stderr)[-500:])
    host = Selected(Host(name="localhost", slots=1), ("0",))
    size = ("64",) if words == ["--small"] else ()
    measured = measure_gpus(Options(program=""), [host], Console(log_level="info"), size=size)
    if isinstance(measured, Unmeasured):
        tell("check --gpu", right=False, exit_code=measured.exit_code, at_fault=dict(measured.at_fault))
        return
    (gpu,) = measured
    problem = gpu.problem or ("" if gpu.name else "PyTorch finds no GPU")
    is_right = not problem and not gpu.num_wrong and all(gpu.speeds.get(one, 0) > 0 for one in SPEEDS)
    tell("check --gpu", right=is_right, gpu=gpu.name, problem=problem, **gpu.speeds)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The machine's name and the versions that count: python -m tests.gpu.machine

What cannot be had is told, and what follows from it shows in the other steps.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping

from .line import tell


def host() -> dict[str, object]:
    return {"node": platform.node(), "cores": os.cpu_count(), "Python": platform.python_version()}


def driver() -> dict[str, object]:
    if shutil.which("nvidia-smi") is None:
        return {"said": "no nvidia-smi"}
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    asked = subprocess.run(ask, capture_output=True, text=True, check=False)
    return {"said": (asked.stdout + asked.stderr).strip()}


def libraries() -> dict[str, object]:
    import torch

    has_nccl = torch.distributed.is_nccl_available()
    nccl = torch.cuda.nccl.version() if has_nccl else "none"
    return {"torch": torch.__version__, "CUDA": torch.version.cuda, "NCCL": str(nccl)}


def gpu() -> dict[str, object]:
    import torch

    found = torch.cuda.get_device_properties(0)
    return {"GPU": found.name, "GiB": round(found.total_memory / 2**30), "GPUs": torch.cuda.device_count()}


def ours() -> dict[str, object]:
    import dslaunch.kernels._C

    return {"dslaunch": dslaunch.__version__, "file": dslaunch.kernels._C.__file__}


PARTS: Mapping[str, Callable[[], Mapping[str, object]]] = {
    "machine": host,
    "driver": driver,
    "libraries": libraries,
    "GPU": gpu,
    "dslaunch": ours,
}


def main() -> None:
    """One line of JSON for each."""
    for name, ask in PARTS.items():
        try:
            tell(name, **ask())
        except Exception as error:
            tell(name, error=f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    sys.exit(main())

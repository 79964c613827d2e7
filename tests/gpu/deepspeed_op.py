"""Compile one of DeepSpeed's optimizers: python -m tests.gpu.deepspeed_op fused_adam

DeepSpeed compiles it at its first use, in the middle of a training. It is kept where torch keeps extensions,
and `tests.gpu.speed` has DeepSpeed use it if it is there, else torch's optimizer.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .line import tell

TOOLS = ("nvcc", "ninja", "c++")
FUSED_ADAM, CPU_ADAM = "fused_adam", "cpu_adam"
BUILDERS = {FUSED_ADAM: "FusedAdamBuilder", CPU_ADAM: "CPUAdamBuilder"}


def main(name: str) -> int:
    """Return 0: without it DeepSpeed trains, too."""
    start = time.monotonic()
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        tell(f"DeepSpeed's {name}", peer=True, error=f"not compiled: there is no {', '.join(missing)}")
        return 0
    try:
        import_deepspeed()
        (built_in(name) / "lock").unlink(missing_ok=True)  # of one that was ended; torch would wait for it
        import deepspeed.ops.op_builder as builders

        getattr(builders, BUILDERS[name])().load(verbose=False)
    except Exception as error:
        tell(f"DeepSpeed's {name}", peer=True, error=f"{type(error).__name__}: {error}"[-500:])
    else:
        tell(f"DeepSpeed's {name}", peer=True, compiled_s=round(time.monotonic() - start, 1))
    return 0


def import_deepspeed() -> Any:
    """Return it, out of the folder PEERS if that is given."""
    if torch.cuda.is_available():  # for this GPU alone, and by the same command each time
        capability = torch.cuda.get_device_capability()
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ".".join(map(str, capability)))
    if "PEERS" in os.environ:
        sys.path.insert(0, os.environ["PEERS"])
    import deepspeed

    return deepspeed


def is_compiled(name: str) -> bool:
    """Whether `main` has made it for this Python and this torch."""
    return (built_in(name) / f"{name}.so").is_file()


def built_in(name: str) -> Path:
    """Return torch's folder for it."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""A plain parallel copy loop, compiled when it is needed: what the kernels' share of the memory
is measured against.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-tree-loop-distribute-patterns")


def build_copy(folder: Path) -> Callable[[Tensor, Tensor, int], None]:
    """Return copy(to, source, num_threads) for float32 tensors of equal length.

    Errors: CalledProcessError if there is no C++ compiler, which a machine that built the kernels has
    """
    library = folder / "memory_copy.so"
    subprocess.run([os.environ.get("CXX", "c++"), *FLAGS, str(SOURCE), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).copy
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    function.restype = None

    def copy(to: Tensor, source: Tensor, num_threads: int) -> None:
        if to.dtype != torch.float32 or source.dtype != torch.float32 or to.numel() != source.numel():
            raise ValueError(
                f"copies float32 of equal length, not {to.dtype} {to.shape}, {source.dtype} {source.shape}"
            )
        function(to.data_ptr(), source.data_ptr(), to.numel(), num_threads)

    return copy

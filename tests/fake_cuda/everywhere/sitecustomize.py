"""With this folder in PYTHONPATH, every Python process that imports torch finds the fake CUDA device.

FAKE_CUDA_DEVICES is their number: 1 unless given.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _WithDevice(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports torch as `tests.fake_cuda.torch_cuda.load` does, where a program imports it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        from tests.fake_cuda import torch_cuda

        native: Any = torch_cuda.load()

        from tests.fake_cuda import nccl

        native.set_num_devices(int(os.environ.get("FAKE_CUDA_DEVICES", "1")))
        nccl.install(native)
        torch: Any = sys.modules["torch"]
        self._spec = torch.__spec__
        return torch  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has put in the one that led here


sys.meta_path.insert(0, _WithDevice())

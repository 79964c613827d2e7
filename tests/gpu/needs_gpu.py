"""A plugin of pytest, `-p tests.gpu.needs_gpu`: without a GPU all tests that need one would be skipped."""

from __future__ import annotations

import torch


def pytest_configure() -> None:
    """End pytest with the error that CUDA has."""
    torch.cuda.init()

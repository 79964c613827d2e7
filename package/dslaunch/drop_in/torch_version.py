"""DeepSpeed's question for the version of torch, which programs put before they choose their way."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion


def required_torch_version(
    min_version: str | float | None = None, max_version: str | float | None = None
) -> bool:
    """Return whether torch is `min_version` or later, and `max_version` or earlier;
    at least one must be given.

    Errors: AssertionError if neither is given, as DeepSpeed raises
    """
    if not min_version and not max_version:
        raise AssertionError("required_torch_version() needs a min_version or a max_version")
    here = TorchVersion(torch.__version__)
    return (not min_version or here >= str(min_version)) and (not max_version or here <= str(max_version))

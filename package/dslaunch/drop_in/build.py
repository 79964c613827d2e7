"""Description of DeepSpeed's installation, as it would be on this machine."""

from __future__ import annotations

import torch

from .op_builders import compatible_ops


def _two_parts(version: str | None) -> str:
    """ "12.4" of "12.4.1+x", and "0.0" if there is none, as DeepSpeed writes it."""
    return ".".join((version or "0.0").partition("+")[0].split(".")[:2])


def _nccl_version() -> str:
    if not torch.cuda.is_available():
        return "0.0"
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


accelerator_name = "cuda" if torch.cuda.is_available() else "cpu"
installed_ops = dict(compatible_ops)
torch_info = {
    "version": _two_parts(torch.__version__),
    "bf16_support": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
    "cuda_version": _two_parts(torch.version.cuda),
    "nccl_version": _two_parts(_nccl_version()),
    "hip_version": _two_parts(torch.version.hip),
}

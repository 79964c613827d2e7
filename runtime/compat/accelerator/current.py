"""The accelerator of this process."""

from __future__ import annotations

from functools import cache
from typing import NoReturn

import torch

from ...environment import read_accelerator
from ...errors import ConfigError
from .accelerator import Accelerator
from .cpu import CpuAccelerator
from .cuda import CudaAccelerator


@cache
def get_accelerator() -> Accelerator:
    """Return the one that engines of this process train on: GPUs if torch has any, else the CPU.

    Errors: ConfigError if DS_ACCELERATOR names another
    """
    accelerator = CudaAccelerator() if torch.cuda.is_available() else CpuAccelerator()
    asked = read_accelerator()
    if asked not in (None, accelerator.device_name()):
        advice = "set CUDA_VISIBLE_DEVICES= to train on the CPU" if asked == "cpu" else "unset it"
        raise ConfigError(
            f"DS_ACCELERATOR={asked!r} in the environment: this process trains on "
            f"{accelerator.device_name()}, which is what torch finds; {advice}"
        )
    return accelerator


def set_accelerator(accel_obj: object) -> NoReturn:
    """Refuse: the runtime trains on GPUs by CUDA or on the CPU.

    Errors: ConfigError
    """
    raise ConfigError(
        f"set_accelerator({type(accel_obj).__name__}): dslaunch trains on the GPUs that torch finds, or on "
        "the CPU; leave it out"
    )


def is_current_accelerator_supported() -> bool:
    """True if there is an accelerator: get_accelerator() returns no other."""
    return isinstance(get_accelerator(), Accelerator)

"""Fused optimizer arithmetic over flat shards in host memory.

No torch, no numpy: arrays arrive through DLPack.
"""

# A checkout on sys.path, where an editable installation puts it, has a top-level `kernels`. Hugging Face's
# libraries import an optional package of that name by itself, and find this folder: there it must be empty,
# without a version, and no error.
if __name__ == "dslaunch.kernels":
    from . import optimizers
    from .lamb import (
        LAMB,
        LambSegment,
        LambShard,
        LambSums,
        lamb_apply,
        lamb_directions,
        lamb_step,
        lamb_step_reference,
    )
    from .norm import squared_norm

    # A star import, as an exception: a new optimizer is written into optimizers.py alone.
    from .optimizers import *  # noqa: F403
    from .shard import Kernel

    __all__ = [
        "LAMB",
        "Kernel",
        "LambSegment",
        "LambShard",
        "LambSums",
        "lamb_apply",
        "lamb_directions",
        "lamb_step",
        "lamb_step_reference",
        "squared_norm",
    ]
    __all__ += optimizers.__all__

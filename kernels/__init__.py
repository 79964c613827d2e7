"""Fused optimizer arithmetic over flat shards in host memory. No torch, no numpy: arrays arrive through DLPack."""

# A checkout on sys.path, where an editable installation puts it, has a top-level `kernels`. Hugging Face's libraries import
# an optional package of that name by itself, and find this folder: there it must be empty, without a version, and no error.
if __name__ == "dslaunch.kernels":
    from .adagrad import AdagradSegment, AdagradShard, adagrad_step, adagrad_step_reference
    from .adam import AdamSegment, AdamShard, adamw_step, adamw_step_reference
    from .lamb import (
        LambSegment,
        LambShard,
        LambSums,
        lamb_apply,
        lamb_directions,
        lamb_step,
        lamb_step_reference,
    )
    from .lion import LionSegment, LionShard, lion_step, lion_step_reference
    from .norm import squared_norm
    from .sgd import SgdSegment, SgdShard, sgd_step, sgd_step_reference

    __all__ = [
        "AdagradSegment",
        "AdagradShard",
        "AdamSegment",
        "AdamShard",
        "LambSegment",
        "LambShard",
        "LambSums",
        "LionSegment",
        "LionShard",
        "SgdSegment",
        "SgdShard",
        "adagrad_step",
        "adagrad_step_reference",
        "adamw_step",
        "adamw_step_reference",
        "lamb_apply",
        "lamb_directions",
        "lamb_step",
        "lamb_step_reference",
        "lion_step",
        "lion_step_reference",
        "sgd_step",
        "sgd_step_reference",
        "squared_norm",
    ]

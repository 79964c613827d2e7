"""Fused optimizer arithmetic over flat shards in host memory. No torch, no numpy: arrays arrive through DLPack."""

# A checkout on sys.path, where an editable installation puts it, has a top-level `kernels`. Hugging Face's libraries import
# an optional package of that name by itself, and find this folder: there it must be empty, without a version, and no error.
if __name__ == "dslaunch.kernels":
    from .adam import AdamSegment, AdamShard, adamw_step, adamw_step_reference, squared_norm

    __all__ = ["AdamSegment", "AdamShard", "adamw_step", "adamw_step_reference", "squared_norm"]

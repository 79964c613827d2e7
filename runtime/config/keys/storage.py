"""Checkpoints and NVMe."""

from __future__ import annotations

from .key import details, hint, is_empty, opaque, refused
from .value import BOOL, COUNT, OBJECT, POSITIVE, TEXT

STORAGE = (
    hint("checkpoint.load_universal", BOOL, "any checkpoint loads at any world size"),
    hint("checkpoint.parallel_write.pipeline_stage", BOOL, "all ranks write, each its own part"),
    hint("checkpoint.writer", OBJECT, "there is one way to write, and async_save"),
    refused("nebula.enabled", note="checkpoint.async_save writes while training goes on"),
    *details(
        "nebula",
        persistent_storage_path=TEXT,
        persistent_time_interval=COUNT,
        num_of_version_in_retention=COUNT,
        enable_nebula_load=BOOL,
        load_path=TEXT,
    ),
    opaque("datastates_ckpt", is_empty, "{}", "checkpoint.async_save writes while training goes on"),
    hint("aio.intra_op_parallelism", POSITIVE, "queue_depth and thread_count say how many are under way"),
    hint("aio.single_submit", BOOL, "it says how libaio is called, which is not used"),
    hint("aio.overlap_events", BOOL, "always so"),
    refused("aio.use_gds", note="what is read goes through host memory"),
)

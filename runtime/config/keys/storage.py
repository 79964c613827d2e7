"""Checkpoints, NVMe, and what activation checkpointing keeps."""

from __future__ import annotations

from .key import details, hint, is_empty, opaque, refused, used
from .value import BOOL, COUNT, OBJECT, POSITIVE, TEXT

_STAYS = "has no effect, which a warning says: inputs stay in the memory that they have"

STORAGE = (
    used(
        "checkpoint.tag_validation",
        "rank 0's tag is taken; where another rank gives another one, Warn warns, Fail is an "
        "error; Warn if left out",
    ),
    used(
        "checkpoint.async_save",
        "save_checkpoint() returns when training may go on, and files are written meanwhile; off if left out",
    ),
    used(
        "checkpoint.preemption_save_dir",
        "after a SIGTERM to any rank, the step that follows saves a checkpoint in this folder and ends with "
        "exit code 143, or with 75 where the job is to have other hosts; if left out, SIGTERM ends at once, "
        "and a job whose hosts change ends after the next checkpoint that the program saves",
    ),
    used(
        "checkpoint.keep_last",
        "so many checkpoints stay in a folder, older ones are removed; all if left out",
    ),
    hint("checkpoint.load_universal", BOOL, "any checkpoint loads at any world size"),
    hint("checkpoint.parallel_write.pipeline_stage", BOOL, "all ranks write, each its own part"),
    hint("checkpoint.writer", OBJECT, "there is one way to write, and async_save"),
    used(
        "checkpoint.use_node_local_storage",
        "on one host any folder will do; where ranks are on several, a warning says that all must see it",
    ),
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
    used("aio.block_size", "with NVMe, bytes of one read or write; 1048576 if left out"),
    used(
        "aio.queue_depth",
        "with NVMe, times thread_count: reads and writes under way at once, 64 at most; 8 if left out",
    ),
    used("aio.thread_count", "see queue_depth; 1 if left out"),
    hint("aio.intra_op_parallelism", POSITIVE, "queue_depth and thread_count say how many are under way"),
    hint("aio.single_submit", BOOL, "it says how libaio is called, which is not used"),
    hint("aio.overlap_events", BOOL, "always so"),
    refused("aio.use_gds", note="what is read goes through host memory"),
    used(
        "activation_checkpointing.cpu_checkpointing",
        "inputs of functions that go through dslaunch.checkpointing.checkpoint() wait in host "
        "memory for the backward",
    ),
    used(
        "activation_checkpointing.synchronize_checkpoint_boundary",
        "wait for the GPU before and after such a function",
    ),
    used(
        "activation_checkpointing.profile",
        "rank 0 prints what these functions took, and their recomputation, for each optimizer step",
    ),
    used(
        "activation_checkpointing.partition_activations",
        "has no effect, which a warning says: without model parallelism there is nothing to divide",
    ),
    used("activation_checkpointing.contiguous_memory_optimization", _STAYS),
    used("activation_checkpointing.number_checkpoints", _STAYS),
)

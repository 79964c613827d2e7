"""The top level of a ds_config, but for its sections."""

from __future__ import annotations

from .key import hint, refused, unmet, used
from .value import BOOL, COUNT, DTYPE, NUMBER, POSITIVE, TEXT

TRAINING = (
    used("train_batch_size", "samples for one optimizer step, over all ranks"),
    used("train_micro_batch_size_per_gpu", "samples for one forward and backward on one rank"),
    used("gradient_accumulation_steps", "forward and backward passes for one optimizer step"),
    used("gradient_clipping", "largest global gradient norm; 0 or left out: no clipping"),
    used(
        "max_skipped_steps",
        "an error after so many steps in a row whose gradients are infinite or NaN; 0: any number; 1000 if "
        "left out where the loss is scaled, else 100; ours, not DeepSpeed's",
    ),
    used("steps_per_print", "optimizer steps between two lines of progress; 0 or left out: none"),
    used(
        "wall_clock_breakdown", "rank 0 prints what forward, backward and step took, for each optimizer step"
    ),
    used("dump_state", "rank 0 prints the whole configuration in effect at the start, as JSON"),
    used("dataloader_drop_last", "leave out the last micro batch where it is not full"),
    unmet("memory_breakdown", BOOL, "no use of memory is printed", quiet=(False,)),
    unmet("log_level", TEXT, "set the level of the logger dslaunch instead"),
    unmet("disable_python_gc", BOOL, "call gc.disable() instead", quiet=(False,)),
    hint("vocabulary_size", POSITIVE, "DeepSpeed only warns of one that is no multiple of 8"),
    hint("prescale_gradients", BOOL, "the mean is the same either way", quiet=(False,)),
    hint("gradient_predivide_factor", NUMBER, "the mean is the same either way", quiet=(1,)),
    hint("disable_allgather", BOOL, "DeepSpeed makes no use of it", quiet=(False,)),
    hint("allgather_size", COUNT, "reduce_bucket_size sets both"),
    hint("zero_allow_untested_optimizer", BOOL, "any torch optimizer may be passed to initialize()"),
    hint("zero_force_ds_cpu_optimizer", BOOL, "what is offloaded is always updated by the kernel for it"),
    hint("seq_parallel_comm_data_type", DTYPE, "gradients are sent as communication_data_type says"),
    hint("seq_parallel_communication_data_type", DTYPE, "gradients are sent as communication_data_type says"),
    used(
        "gradient_allreduce_op",
        '"mean" (if left out) or "sum" of the gradients of the ranks that have samples of their own',
    ),
    used(
        "managed_gradient_accumulation",
        "true if left out; false: every step() updates, after however many backwards, each of which has the "
        "share of gradient_accumulation_steps",
    ),
    refused("sparse_gradients", note="leave it out"),
    refused("graph_harvesting", note="leave it out"),
)

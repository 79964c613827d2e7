"""The top level of a ds_config, but for its sections."""

from __future__ import annotations

from .key import hint, refused, unmet
from .value import BOOL, COUNT, DTYPE, NUMBER, POSITIVE, TEXT

TRAINING = (
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
    refused("sparse_gradients", note="leave it out"),
    refused("graph_harvesting", note="leave it out"),
)

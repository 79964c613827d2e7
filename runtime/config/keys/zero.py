"""The section `zero_optimization`."""

from __future__ import annotations

from collections.abc import Iterator

from .key import Key, hint, is_empty, opaque, refused
from .value import BOOL, COUNT, RATIO, ValueKind

_GATHERED = "state_dict() is always whole"


def _stage3(name: str, kind: ValueKind, note: str) -> Iterator[Key]:
    """DeepSpeed takes these with and without their prefix."""
    for spelling in (f"stage3_{name}", name):
        yield hint(f"zero_optimization.{spelling}", kind, note)


ZERO = (
    hint("zero_optimization.allgather_bucket_size", COUNT, "reduce_bucket_size sets both"),
    hint("zero_optimization.allgather_partitions", BOOL, "always so"),
    hint("zero_optimization.reduce_scatter", BOOL, "always so in stages 1, 2 and 3"),
    hint("zero_optimization.contiguous_gradients", BOOL, "always so"),
    hint("zero_optimization.overlap_comm", BOOL, "always so"),
    hint("zero_optimization.round_robin_gradients", BOOL, "all ranks have an equal part of each unit"),
    hint(
        "zero_optimization.use_multi_rank_bucket_allreduce",
        BOOL,
        "one reduce_scatter of a unit serves all ranks",
    ),
    hint("zero_optimization.load_from_fp32_weights", BOOL, "always so"),
    hint("zero_optimization.elastic_checkpoint", BOOL, "any checkpoint loads at any world size"),
    hint("zero_optimization.memory_efficient_linear", BOOL, "no linear layer keeps its weight"),
    hint("zero_optimization.override_module_apply", BOOL, "nothing of torch is overridden"),
    hint(
        "zero_optimization.pipeline_loading_checkpoint",
        BOOL,
        "each rank reads its own part, tensor by tensor",
    ),
    hint(
        "zero_optimization.log_trace_cache_warnings", BOOL, "the order of modules is a hint, and may change"
    ),
    hint("zero_optimization.stage3_gather_fp16_weights_on_model_save", BOOL, _GATHERED),
    *_stage3(
        "max_live_parameters", COUNT, "two units beside those in use; prefetch_bucket_size sets their size"
    ),
    *_stage3("max_reuse_distance", COUNT, "what comes next is kept, nothing else"),
    *_stage3("gather_16bit_weights_on_model_save", BOOL, _GATHERED),
    *_stage3(
        "module_granularity_threshold", COUNT, "whole blocks are gathered, as large as prefetch_bucket_size"
    ),
    *_stage3("use_all_reduce_for_fetch_params", BOOL, "units are gathered by all_gather"),
    *_stage3("allgather_sequential", BOOL, "units are gathered one after the other"),
    *_stage3("partition_stream_chunk_size", COUNT, "a unit is divided in one piece"),
    refused("zero_optimization.legacy_stage1", note="there is one stage 1"),
    refused(
        "zero_optimization.zero_quantized_weights",
        note="nothing is sent quantized; zero_hpz_partition_size keeps gathers within a host",
    ),
    refused(
        "zero_optimization.zero_quantized_nontrainable_weights",
        note="nothing is sent quantized; zero_hpz_partition_size keeps gathers within a host",
    ),
    refused(
        "zero_optimization.zero_quantized_gradients",
        note="nothing is sent quantized; communication_data_type may be 16 bits wide",
    ),
    hint(
        "zero_optimization.mics_hierarchical_params_gather",
        BOOL,
        "a gather stays among mics_shard_size ranks",
        quiet=(False,),
    ),
    opaque("zero_optimization.zeropp_loco_param", is_empty, "{}", "leave it out"),
    opaque(
        "zero_optimization.zenflow",
        is_empty,
        "{}",
        "offload_optimizer.delayed_update runs the update beside the training",
    ),
    hint(
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        BOOL,
        "offload_optimizer says where Muon's states lie",
    ),
    hint(
        "zero_optimization.cpu_offload",
        BOOL,
        "true: the old name of offload_optimizer with device cpu, which it then is",
        quiet=(False,),
    ),
    hint(
        "zero_optimization.cpu_offload_param",
        BOOL,
        "true: the old name of offload_param with device cpu, which it then is",
        quiet=(False,),
    ),
    hint("zero_optimization.cpu_offload_use_pin_memory", BOOL, "offload_optimizer.pin_memory says it"),
    hint(
        "zero_optimization.offload_optimizer.buffer_count",
        COUNT,
        "the states of three units at most are here",
    ),
    hint("zero_optimization.offload_optimizer.pipeline_read", BOOL, "always so"),
    hint("zero_optimization.offload_optimizer.pipeline_write", BOOL, "always so"),
    hint("zero_optimization.offload_optimizer.fast_init", BOOL, "always so"),
    hint("zero_optimization.offload_optimizer.cpuadam_cores_perc", RATIO, "OMP_NUM_THREADS says it"),
    hint("zero_optimization.offload_param.buffer_count", COUNT, "prefetch_bucket_size sets what is here"),
    hint("zero_optimization.offload_param.buffer_size", COUNT, "a buffer is as large as its unit"),
    hint("zero_optimization.offload_param.max_in_cpu", COUNT, "only what is in use is in memory"),
    hint("zero_optimization.compute_grad_norm", BOOL, "always so", quiet=(True,)),
    hint("zero_optimization.parameter_alignment", BOOL, "always so"),
)

"""Every key of a ds_config that is known here.

A section is any path that other paths continue; a section that no path continues is one opaque OBJECT.
null anywhere means the same as leaving the key out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from .key import Fate, Key, details, hint, is_empty, nothing_enabled, opaque, refused, unmet, used
from .removed import is_removed
from .value import (
    ANY,
    BOOL,
    COUNT,
    DTYPE,
    INT,
    LIST,
    NUMBER,
    OBJECT,
    POSITIVE,
    RATIO,
    SIZE,
    TEXT,
    TEXTS,
    Kind,
    choice,
)

_ADAM = ("Adam", "AdamW")
_OURS = ("Adam", "AdamW", "Muon")
_WARMUP = ("WarmupLR", "WarmupDecayLR")
_ANY_WARMUP = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_DEEPSPEED_SCHEDULERS = (*_ANY_WARMUP, "OneCycle", "LRRangeTest")

_TRAINING = (
    used("train_batch_size", "samples for one optimizer step, over all ranks"),
    used("train_micro_batch_size_per_gpu", "samples for one forward and backward on one rank"),
    used("gradient_accumulation_steps", "forward and backward passes for one optimizer step"),
    used("gradient_clipping", "largest global gradient norm; 0 or left out: no clipping"),
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
    hint("seq_parallel_comm_data_type", DTYPE, "no rank has a part of a sequence"),
    hint("seq_parallel_communication_data_type", DTYPE, "no rank has a part of a sequence"),
    refused(
        "gradient_allreduce_op",
        choice("mean", "sum"),
        off=("mean",),
        note="for a sum, multiply the loss by the number of ranks",
    ),
    refused("managed_gradient_accumulation", off=(True,), note="step() where no update is due only counts"),
    refused("sparse_gradients", note="leave it out"),
    refused("graph_harvesting", note="leave it out"),
    refused(
        "sequence_parallel_size",
        POSITIVE,
        off=(1,),
        note="no sequence is divided between ranks; activation_checkpointing makes room for longer ones",
    ),
    refused(
        "use_data_before_expert_parallelism", note="experts are parameters as others are, divided at stage 3"
    ),
)

_OPTIMIZER = (
    used(
        "optimizer.type",
        "Adam, AdamW, Muon, Lamb, Lion, or a class of torch.optim, in any case; Adam is AdamW unless adam_w_mode is false; "
        "Muon is for matrices, with AdamW for all else. The types below have these parameters, others their own "
        "keyword arguments",
    ),
    used(
        "optimizer.params.lr", "learning rate, 0.001 if left out (Muon: 0.02, and 0.0003 for AdamW)", *_OURS
    ),
    used("optimizer.params.weight_decay", "0 if left out", *_OURS),
    used("optimizer.params.betas", "[0.9, 0.999] if left out (Muon: [0.9, 0.95])", *_OURS),
    used("optimizer.params.eps", "1e-8 if left out (Muon: 1e-10)", *_OURS),
    used(
        "optimizer.params.adam_w_mode",
        "false: weight decay is added to the gradient (type Adam only)",
        *_ADAM,
    ),
    used("optimizer.params.muon_lr", "of the matrices, lr if left out", "Muon"),
    used("optimizer.params.adam_lr", "of all else, lr if left out", "Muon"),
    used("optimizer.params.momentum", "of the matrices, 0.95 if left out", "Muon"),
    hint(
        "optimizer.params.ns_method",
        choice("gram", "standard"),
        "torch's Newton-Schulz iteration",
        types=("Muon",),
    ),
    refused("optimizer.params.per_head_muon", note="each matrix is taken whole", types=("Muon",)),
    refused(
        "optimizer.params.bias_correction",
        off=(True,),
        note="pass an optimizer of your own to initialize()",
        types=_ADAM,
    ),
    refused(
        "optimizer.params.amsgrad", note="pass torch.optim.AdamW(amsgrad=True) to initialize()", types=_ADAM
    ),
    refused(
        "optimizer.params.maximize", note="pass torch.optim.AdamW(maximize=True) to initialize()", types=_ADAM
    ),
    refused("optimizer.params.differentiable", note="no gradient flows through a step"),
    refused("optimizer.params.fp32_optimizer_states", off=(True,), note="states are always float32"),
    refused(
        "optimizer.params.max_grad_norm",
        NUMBER,
        off=(),
        note="write it as gradient_clipping at the top level",
    ),
    hint("optimizer.params.torch_adam", BOOL, "there is one Adam", types=_ADAM),
    hint("optimizer.params.set_grad_none", BOOL, "always so", types=(*_ADAM, "Lion")),
    hint(
        "optimizer.params.capturable",
        BOOL,
        "no step is captured in a CUDA graph",
        quiet=(False,),
        types=_ADAM,
    ),
    hint("optimizer.params.foreach", BOOL, "one kernel updates a whole shard", types=_ADAM),
    hint("optimizer.params.fused", BOOL, "one kernel updates a whole shard", types=_ADAM),
    hint("optimizer.legacy_fusion", BOOL, "one kernel updates a whole shard", quiet=(False,)),
)

_SCHEDULER = (
    used("scheduler.type", f"{', '.join(_DEEPSPEED_SCHEDULERS)}, or a class of torch.optim.lr_scheduler"),
    used("scheduler.params.last_batch_iteration", "-1: from the start", *_DEEPSPEED_SCHEDULERS),
    used("scheduler.params.warmup_min_lr", "lr of the first two steps, 0 if left out", *_WARMUP),
    used("scheduler.params.warmup_max_lr", "left out: each group's own lr (WarmupDecayLR: 0.001)", *_WARMUP),
    used("scheduler.params.warmup_min_ratio", "0 if left out", "WarmupCosineLR"),
    used("scheduler.params.warmup_num_steps", "1000 if left out; below 2 counts as 2", *_ANY_WARMUP),
    used("scheduler.params.warmup_type", '"log" (if left out) or "linear"', *_ANY_WARMUP),
    used("scheduler.params.total_num_steps", "must be given", "WarmupDecayLR", "WarmupCosineLR"),
    used("scheduler.params.cos_min_ratio", "0.0001 if left out", "WarmupCosineLR"),
    used("scheduler.params.cycle_min_lr", "must be given", "OneCycle"),
    used("scheduler.params.cycle_max_lr", "must be given", "OneCycle"),
    used("scheduler.params.decay_lr_rate", "0 if left out", "OneCycle"),
    used("scheduler.params.cycle_first_step_size", "2000 if left out", "OneCycle"),
    used("scheduler.params.cycle_second_step_size", "left out: as the first", "OneCycle"),
    used("scheduler.params.cycle_first_stair_count", "0, no stairs, if left out", "OneCycle"),
    used("scheduler.params.cycle_second_stair_count", "left out: as the first", "OneCycle"),
    used("scheduler.params.decay_step_size", "0, no decay, if left out", "OneCycle"),
    used("scheduler.params.cycle_momentum", "true if left out; needs an optimizer with betas", "OneCycle"),
    used("scheduler.params.cycle_min_mom", "0.8 if left out", "OneCycle"),
    used("scheduler.params.cycle_max_mom", "0.9 if left out", "OneCycle"),
    used("scheduler.params.decay_mom_rate", "0 if left out", "OneCycle"),
    used("scheduler.params.lr_range_test_min_lr", "0.001 if left out", "LRRangeTest"),
    used("scheduler.params.lr_range_test_step_size", "2000 if left out", "LRRangeTest"),
    used("scheduler.params.lr_range_test_step_rate", "1 if left out", "LRRangeTest"),
    used("scheduler.params.lr_range_test_staircase", "false if left out", "LRRangeTest"),
)

_PRECISION = (
    used("bf16.enabled", "bfloat16 parameters and gradients with a float32 master copy (old name: bfloat16)"),
    hint("bf16.immediate_grad_update", BOOL, "data_types.grad_accum_dtype says where gradients are added up"),
    hint("bf16.check_grad_overflow", BOOL, "inf and NaN are always looked for", quiet=(True,)),
    refused(
        "bf16.bf16_master_weights_and_grads",
        note="masters are always float32; offload_optimizer or a higher stage makes room",
    ),
    refused(
        "bf16.bf16_optimizer_states",
        note="states are always float32; offload_optimizer or a higher stage makes room",
    ),
    used("fp16.enabled", "float16 parameters and gradients with a float32 master copy, and a scaled loss"),
    used("fp16.auto_cast", "floating-point inputs of the model become float16"),
    used("fp16.loss_scale", "a constant; 0, which is the default: as large as the gradients allow"),
    used("fp16.initial_scale_power", "it begins at 2 to the power of this; 16 if left out"),
    used("fp16.loss_scale_window", "it is doubled after so many steps without inf or NaN; 1000 if left out"),
    used("fp16.hysteresis", "so many steps with inf or NaN halve it; 2 if left out"),
    used("fp16.consecutive_hysteresis", "a good step between them starts the count again"),
    used("fp16.min_loss_scale", "it is an error if half of that were needed; 1 if left out"),
    hint("fp16.fused_mode", BOOL, "always so"),
    refused(
        "fp16.fp16_master_weights_and_grads",
        note="masters are always float32; offload_optimizer or a higher stage makes room",
    ),
    used("torch_autocast.enabled", "float32 parameters and gradients; the forward runs under torch.autocast"),
    used("torch_autocast.dtype", '"bfloat16" (if left out) or "float16", with a scaled loss'),
    hint(
        "torch_autocast.lower_precision_safe_modules",
        TEXTS,
        "torch chooses by operation, and all gradients are averaged in float32",
    ),
    refused("amp.enabled", note='use "torch_autocast": {"enabled": true}, or "bf16"'),
    *details(
        "amp",
        opt_level=TEXT,
        cast_model_type=TEXT,
        patch_torch_functions=BOOL,
        keep_batchnorm_fp32=ANY,
        master_weights=BOOL,
        loss_scale=ANY,
        cast_model_outputs=TEXT,
        num_losses=POSITIVE,
        verbosity=INT,
        min_loss_scale=SIZE,
        max_loss_scale=SIZE,
    ),
    used(
        "data_types.grad_accum_dtype",
        "in which dtype gradients of micro batches are added up: fp32, or the model's; left out: fp32 at stages 2 and 3, where it "
        "costs 4/N bytes for each, and the model's at stages 0 and 1, where it would cost 4",
    ),
    used("data_types.buffer_dtype", "what floating-point buffers become; left out: they stay what they are"),
    used(
        "communication_data_type",
        "in which dtype gradients are averaged; left out: that of the parameters (gloo adds up in float32 all the same)",
    ),
    refused("data_types.param_dtype", DTYPE, off=(), note="bf16.enabled or fp16.enabled set it"),
    refused(
        "data_types.keep_in_fp32_modules",
        TEXTS,
        off=((),),
        note="torch_autocast keeps all parameters in float32",
    ),
)

_GATHERED = "state_dict() is always whole"


def _stage3(name: str, kind: Kind, note: str) -> Iterator[Key]:
    """DeepSpeed takes these with and without their prefix."""
    for spelling in (f"stage3_{name}", name):
        yield hint(f"zero_optimization.{spelling}", kind, note)


_ZERO = (
    used(
        "zero_optimization.stage",
        "0: nothing is sharded; 1: optimizer states are; 2: gradients too; 3: parameters too",
    ),
    used("zero_optimization.reduce_bucket_size", "elements that are reduced together"),
    used(
        "zero_optimization.stage3_prefetch_bucket_size",
        "at stage 3, elements that are gathered together; the next ones are under way meanwhile "
        "(also: prefetch_bucket_size)",
    ),
    hint("zero_optimization.allgather_bucket_size", COUNT, "reduce_bucket_size sets both"),
    hint("zero_optimization.allgather_partitions", BOOL, "always so"),
    hint("zero_optimization.reduce_scatter", BOOL, "always so in stages 1, 2 and 3"),
    hint("zero_optimization.contiguous_gradients", BOOL, "always so"),
    hint("zero_optimization.overlap_comm", BOOL, "always so"),
    hint("zero_optimization.round_robin_gradients", BOOL, "all ranks have the same part of each unit"),
    hint(
        "zero_optimization.use_multi_rank_bucket_allreduce",
        BOOL,
        "one reduce_scatter of a unit serves all ranks",
    ),
    hint("zero_optimization.ignore_unused_parameters", BOOL, "always so"),
    hint("zero_optimization.load_from_fp32_weights", BOOL, "always so"),
    hint("zero_optimization.elastic_checkpoint", BOOL, "any checkpoint loads at any world size"),
    hint("zero_optimization.enable_sanity_checks", BOOL, "what is checked is always checked"),
    used(
        "zero_optimization.sub_group_size",
        "with states on NVMe, largest number of elements that are updated together; else without effect",
    ),
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
    used(
        "zero_optimization.mics_shard_size",
        "what is sharded is shared by so many neighbouring ranks, and each such group has all of it; -1 or left out: by all",
    ),
    used(
        "zero_optimization.zero_hpz_partition_size",
        "at stage 3, parameters are shared by so many neighbouring ranks (those of one host), all else by all; 1 or left "
        "out: parameters, too",
    ),
    used(
        "zero_optimization.leaf_module.classes",
        "names of classes whose modules are gathered as one at stage 3",
    ),
    used("zero_optimization.leaf_module.names", "full names of such modules"),
    used("zero_optimization.leaf_module.name_suffixes", "ends of full names of such modules"),
    *_stage3("param_persistence_threshold", COUNT, "small parameters travel with the others of their unit"),
    *_stage3("model_persistence_threshold", COUNT, "as above"),
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
        "Muon's states lie where the parameters do",
    ),
    refused("zero_optimization.cpu_offload", note="write offload_optimizer with device cpu"),
    refused("zero_optimization.cpu_offload_param", note="write offload_param with device cpu"),
    hint("zero_optimization.cpu_offload_use_pin_memory", BOOL, "offload_optimizer.pin_memory says it"),
    used(
        "zero_optimization.offload_optimizer.device",
        "where optimizer states and float32 masters lie, at stages 1 to 3: none (or left out), cpu or nvme; cpu has no effect "
        "where the run is on CPUs",
    ),
    used("zero_optimization.offload_optimizer.nvme_path", "a folder on a local disk, for nvme"),
    used(
        "zero_optimization.offload_optimizer.pin_memory",
        "page-locked host memory, which a GPU copies faster, for cpu",
    ),
    used(
        "zero_optimization.offload_optimizer.ratio",
        "share of the trained elements whose states leave the device, for cpu; 1 if left out",
    ),
    hint(
        "zero_optimization.offload_optimizer.buffer_count",
        COUNT,
        "the states of three units at most are here",
    ),
    hint("zero_optimization.offload_optimizer.pipeline_read", BOOL, "always so"),
    hint("zero_optimization.offload_optimizer.pipeline_write", BOOL, "always so"),
    hint("zero_optimization.offload_optimizer.fast_init", BOOL, "always so"),
    used(
        "zero_optimization.offload_optimizer.super_offload",
        "true: units are updated during backward, with the same numbers, for cpu at stages 2 and 3; false if left out",
    ),
    used(
        "zero_optimization.offload_optimizer.delayed_update.enabled",
        "true: the update runs beside the next forward and backward, which changes the numbers, for cpu at stages 2 and 3; false "
        "if left out",
    ),
    used(
        "zero_optimization.offload_optimizer.delayed_update.warmup_steps",
        "steps at the beginning that are not delayed; 40 if left out",
    ),
    hint("zero_optimization.offload_optimizer.cpuadam_cores_perc", RATIO, "OMP_NUM_THREADS says it"),
    used(
        "zero_optimization.offload_param.device",
        "where the parameters lie between their uses, at stage 3: none (or left out), cpu or nvme; cpu has no effect where the "
        "run is on CPUs",
    ),
    used("zero_optimization.offload_param.nvme_path", "a folder on a local disk, for nvme"),
    used(
        "zero_optimization.offload_param.pin_memory",
        "page-locked host memory, which a GPU copies faster, for cpu",
    ),
    hint("zero_optimization.offload_param.buffer_count", COUNT, "prefetch_bucket_size sets what is here"),
    hint("zero_optimization.offload_param.buffer_size", COUNT, "a buffer is as large as its unit"),
    hint("zero_optimization.offload_param.max_in_cpu", COUNT, "only what is in use is in memory"),
    hint("zero_optimization.compute_grad_norm", BOOL, "always so", quiet=(True,)),
    hint("zero_optimization.parameter_alignment", BOOL, "always so"),
)

_STAYS = "has no effect, which a warning says: inputs stay in the memory that they have"

_STORAGE = (
    used(
        "checkpoint.tag_validation",
        "rank 0's tag is taken; where another rank gives another one, Warn warns, Fail is an error; Warn if left out",
    ),
    used(
        "checkpoint.async_save",
        "save_checkpoint() returns when training may go on, and files are written meanwhile; off if left out",
    ),
    used(
        "checkpoint.preemption_save_dir",
        "after a SIGTERM to any rank, the step that follows saves a checkpoint in this folder and ends with exit code 143; "
        "SIGTERM ends at once if left out",
    ),
    used(
        "checkpoint.keep_last",
        "so many checkpoints stay in a folder, older ones are removed; all if left out",
    ),
    hint("checkpoint.load_universal", BOOL, "any checkpoint loads at any world size"),
    hint("checkpoint.parallel_write.pipeline_stage", BOOL, "all ranks write, each its own part"),
    hint("checkpoint.writer", OBJECT, "there is one way to write, and async_save"),
    refused(
        "checkpoint.use_node_local_storage",
        note="all ranks must see the folder: save to a shared one or to a URL, with checkpoint.async_save",
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
    hint("aio.single_submit", BOOL, "requests go to the kernel as they come"),
    hint("aio.overlap_events", BOOL, "always so"),
    refused("aio.use_gds", note="what is read goes through host memory"),
    used(
        "activation_checkpointing.cpu_checkpointing",
        "inputs of functions that go through dslaunch.checkpointing.checkpoint() wait in host memory for the backward",
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

_MONITOR = (
    used("tensorboard.enabled", "rank 0 writes loss, lr and more for TensorBoard; needs its package"),
    used("tensorboard.output_path", "the folder in which job_name is one; the current one if left out"),
    used("tensorboard.job_name", '"DeepSpeedJobName" if left out'),
    used("csv_monitor.enabled", "rank 0 writes the same, a CSV file for each name"),
    used("csv_monitor.output_path", "as tensorboard.output_path"),
    used("csv_monitor.job_name", "as tensorboard.job_name"),
    used("wandb.enabled", "rank 0 logs the same to Weights & Biases; needs the package wandb"),
    used("wandb.group", "of the run"),
    used("wandb.team", "the run's entity"),
    used("wandb.project", '"deepspeed" if left out'),
    refused("comet.enabled", note="use tensorboard, csv_monitor or wandb"),
    *details(
        "comet",
        samples_log_interval=POSITIVE,
        project=TEXT,
        workspace=TEXT,
        api_key=TEXT,
        experiment_name=TEXT,
        experiment_key=TEXT,
        online=BOOL,
        mode=TEXT,
    ),
    used(
        "comms_logger.enabled",
        "time the engine's collectives, each of which then blocks; engine.log_comm_summary() prints what they took",
    ),
    used("comms_logger.verbose", "rank 0 prints each of them"),
    used("comms_logger.prof_all", "all of them, which is so if left out; false: those in prof_ops"),
    used("comms_logger.prof_ops", "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather"),
    used("comms_logger.debug", "apart by what was sent"),
    used(
        "flops_profiler.enabled",
        "rank 0 prints floating-point operations, latency and parameters of each module, once",
    ),
    used("flops_profiler.profile_step", "after so many optimizer steps; 1 if left out"),
    used("flops_profiler.module_depth", "depth to which modules are listed; -1, which is all, if left out"),
    used("flops_profiler.top_modules", "so many classes of modules are named at each depth; 1 if left out"),
    used("flops_profiler.detailed", "false: without the list of modules"),
    used("flops_profiler.output_file", "a file to write instead"),
    used(
        "flops_profiler.recompute_fwd_factor",
        "share of the forward that the backward computes again, for the FLOPS of the backward; 0 if left out",
    ),
    used(
        "timers.throughput.enabled",
        "samples per second, printed every steps_per_print; if left out: where that is given",
    ),
    used("timers.throughput.synchronized", "wait for the GPU before such a line; true if left out"),
)

_OTHER = (
    refused("elasticity.enabled", note="give the batch sizes themselves"),
    *details(
        "elasticity",
        max_train_batch_size=POSITIVE,
        micro_batch_sizes=LIST,
        min_gpus=POSITIVE,
        max_gpus=POSITIVE,
        min_time=COUNT,
        version=NUMBER,
        ignore_non_elastic_batch_info=BOOL,
        prefer_larger_batch=BOOL,
        prefer_larger_batch_size=BOOL,
        model_parallel_size=POSITIVE,
        num_gpus_per_node=POSITIVE,
    ),
    refused("hybrid_engine.enabled", note="the model generates as it is, at every stage"),
    *details(
        "hybrid_engine",
        max_out_tokens=POSITIVE,
        inference_tp_size=POSITIVE,
        release_inference_cache=BOOL,
        pin_parameters=BOOL,
        tp_gather_partition_size=POSITIVE,
        enable_cuda_graph=BOOL,
    ),
    refused("eigenvalue.enabled", note="leave it out"),
    *details(
        "eigenvalue",
        verbose=BOOL,
        max_iter=POSITIVE,
        tol=SIZE,
        stability=SIZE,
        gas_boundary_resolution=POSITIVE,
        layer_name=TEXT,
        layer_num=COUNT,
    ),
    refused("progressive_layer_drop.enabled", note="leave it out"),
    *details("progressive_layer_drop", theta=NUMBER, gamma=NUMBER),
    refused("compile.enabled", note="call engine.compile(), which is torch.compile"),
    refused("compile.deepcompile", note="call engine.compile(), which is torch.compile"),
    *details(
        "compile",
        backend=TEXT,
        kwargs=OBJECT,
        autoep_non_moe=BOOL,
        free_activation=BOOL,
        free_activation_threshold=COUNT,
        offload_activation=BOOL,
        offload_activation_pin_memory=BOOL,
        offload_opt_states=BOOL,
        offload_parameters=BOOL,
        double_buffer=BOOL,
        symmetric_memory=BOOL,
        debug_log=BOOL,
        sync_before_reduce=BOOL,
        sync_after_reduce=BOOL,
        sync_before_allgather=BOOL,
        sync_after_allgather=BOOL,
        keep_int_input_tensors=BOOL,
        keep_all_input_tensors=BOOL,
        passes=TEXTS,
    ),
    opaque(
        "autotuning",
        nothing_enabled,
        "nothing enabled in it",
        "wall_clock_breakdown and flops_profiler measure what you try",
    ),
    opaque("compression_training", nothing_enabled, "nothing enabled in it", "leave it out"),
    opaque("curriculum_learning", nothing_enabled, "nothing enabled in it", "leave it out"),
    opaque(
        "data_efficiency",
        nothing_enabled,
        "nothing enabled in it",
        "choose and order samples in the training data",
    ),
    opaque(
        "expert_parallel",
        nothing_enabled,
        "nothing enabled in it",
        "experts are parameters as others are, divided at stage 3",
    ),
    opaque("quantize_training", nothing_enabled, "nothing enabled in it", "leave it out"),
    opaque("pipeline", is_empty, "{}", "stage 3 divides a model that is too large"),
    opaque("sparse_attention", is_empty, "{}", "leave it out"),
    opaque(
        "tensor_parallel",
        lambda value: value in ({}, {"autotp_size": 0}),
        '{"autotp_size": 0}',
        "stage 3 divides a model that is too large",
    ),
    opaque("weight_quantization", is_empty, "{}", "it is for inference"),
)


def _say_if_removed(key: Key) -> Key:
    if key.fate is not Fate.REFUSED or not is_removed(key.path):
        return key
    return replace(key, note=f"DeepSpeed 0.19.8 has removed it, too: {key.note}")


KEYS: tuple[Key, ...] = tuple(
    map(
        _say_if_removed,
        (
            *_TRAINING,
            *_OPTIMIZER,
            *_SCHEDULER,
            *_PRECISION,
            *_ZERO,
            *_STORAGE,
            *_MONITOR,
            *_OTHER,
        ),
    )
)


def keys_for(
    optimizer_type: str | None, scheduler_type: str | None, class_params: Mapping[str, Iterable[str]]
) -> dict[str, Key]:
    """The keys of a config with these types, by path.

    A type that is None is not known: everything below its `params` is accepted, since the type itself is the fault.
    `class_params` are, by section, the keyword arguments of a class of torch, which no table can list.
    """
    keys = {
        key.path: key
        for key in KEYS
        if not key.types or optimizer_type in key.types or scheduler_type in key.types
    }
    for section, names in class_params.items():
        for path in (f"{section}.params.{name}" for name in names):
            keys.setdefault(path, used(path, ""))
    for section, kind in (("optimizer", optimizer_type), ("scheduler", scheduler_type)):
        if kind is None or not any(path.startswith(f"{section}.params.") for path in keys):
            keys = {path: key for path, key in keys.items() if not path.startswith(f"{section}.params.")}
            keys[f"{section}.params"] = Key(path=f"{section}.params", fate=Fate.DETAIL, kind=OBJECT)
    return keys

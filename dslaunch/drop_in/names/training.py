"""`deepspeed.runtime`, `deepspeed.zero` and `deepspeed.checkpointing`."""

from __future__ import annotations

from .table import Module, inside, mapped, works

_OPTIMIZER = "one optimizer over flat shards, a torch.optim.Optimizer, at every ZeRO stage"
_ZERO = (
    works("dslaunch.runtime.zero.api", "Init GatheredParameters ZeroParamStatus"),
    works("dslaunch.runtime.zero.api", "register_external_parameter"),
)
_CHECKPOINTING = (
    works(
        "dslaunch.runtime.activation",
        "checkpoint non_reentrant_checkpoint configure is_configured reset get_cuda_rng_tracker model_parallel_cuda_manual_seed",
    ),
    inside(
        "deepspeed_checkpointing_enabled mpu mp_rank mp_size mp_group num_layers contiguous_data_buffers data_offsets "
        "contiguous_size_buffers size_offsets timers PARTITION_ACTIVATIONS CPU_CHECKPOINT CONTIGUOUS_CHECKPOINTING "
        "SYNCHRONIZE PROFILE_TIME detach_variable CudaRNGStatesTracker model_parallel_reconfigure_tp_seed get_partition_start "
        "get_partition_size gather_partitioned_activations extract_tensors merge_tensors is_activation_to_checkpoint "
        "partition_activations get_partitioned_activations_for_backward get_cpu_activations_for_backward "
        "get_offloaded_activations_for_backward restore_offloaded_activations CheckpointFunction "
        "partition_activations_in_checkpoint set_num_layers"
    ),
)
_INIT = "models are made inside `with deepspeed.zero.Init()`, without any of torch's functions being replaced"

TRAINING: tuple[Module, ...] = (
    Module("deepspeed.runtime"),
    Module(
        "deepspeed.zero",
        (
            *_ZERO,
            inside("ZeroParamType DeepSpeedZeRoOffload DeepSpeedTensorOverride unwrap_model_for_generation"),
        ),
    ),
    Module(
        "deepspeed.runtime.zero",
        (
            *_ZERO,
            inside("ZeroParamType DeepSpeedZeRoOffload DeepSpeedTensorOverride unwrap_model_for_generation"),
        ),
    ),
    Module(
        "deepspeed.runtime.zero.partition_parameters",
        (
            *_ZERO,
            mapped(
                "dslaunch.drop_in.constructors",
                "zero_wrapper_for_fp_tensor_constructor _orig_torch_arange",
                f"may be called; {_INIT}",
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.engine",
        (
            mapped("dslaunch.runtime.engine", "DeepSpeedEngine=Engine", "one engine for every configuration"),
            works("typing", "DeepSpeedOptimizerCallable=Callable DeepSpeedSchedulerCallable=Callable"),
            inside(
                "MEMORY_OPT_ALLREDUCE_SIZE CASTABLE_DTYPES APEX_INSTALLED split_half_float_double_sparse EngineTimers"
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.base_optimizer",
        (
            mapped(
                "dslaunch.runtime.optim.flat",
                "DeepSpeedOptimizer=FlatOptimizer ZeROOptimizer=FlatOptimizer",
                _OPTIMIZER,
            ),
            inside("BackwardHookStateManager"),
        ),
    ),
    Module(
        "deepspeed.runtime.lr_schedules",
        (
            works(
                "dslaunch.runtime.optim.schedules",
                "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR",
            ),
            works(
                "dslaunch.drop_in.constants",
                "VALID_LR_SCHEDULES LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR",
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.dataloader",
        (works("dslaunch.runtime.data", "RepeatingLoader DeepSpeedDataLoader=Loader"),),
    ),
    Module("deepspeed.checkpointing", _CHECKPOINTING),
    Module("deepspeed.runtime.activation_checkpointing"),
    Module("deepspeed.runtime.activation_checkpointing.checkpointing", _CHECKPOINTING),
)

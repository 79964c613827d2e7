"""`deepspeed.runtime`, `deepspeed.zero` and `deepspeed.checkpointing`."""

from __future__ import annotations

from ...runtime.optimizers.registry import DEEPSPEED_CONSTANTS
from .table import INSIDE, Module, inside, mapped, refused, works

_OPTIMIZER = "one optimizer over flat shards, a torch.optim.Optimizer, at every ZeRO stage"
_ZERO = (
    mapped(
        "dslaunch.drop_in.calls",
        "Init",
        "a parameter keeps its shape and numel() while it is sharded, and a rank that is alone has all "
        "values here: its ds_status is AVAILABLE",
    ),
    works("dslaunch.runtime.zero.api", "GatheredParameters"),
    works("dslaunch.drop_in.statuses", "ZeroParamStatus"),
    works("dslaunch.runtime.zero.api", "register_external_parameter"),
)
_ZERO_TOP = (
    works("dslaunch.runtime.compat.tiled_linear", "TiledLinear TiledLinearReturnBias"),
    works("dslaunch.runtime.compat.generation", "unwrap_model_for_generation"),
    inside("ZeroParamType DeepSpeedZeRoOffload DeepSpeedTensorOverride"),
)
_CHECKPOINTING = (
    works(
        "dslaunch.runtime.activation.checkpointing",
        "checkpoint non_reentrant_checkpoint configure is_configured reset get_cuda_rng_tracker "
        "model_parallel_cuda_manual_seed _CUDA_RNG_STATE_TRACKER _MODEL_PARALLEL_RNG_TRACKER_NAME",
    ),
    inside(
        "deepspeed_checkpointing_enabled mpu mp_rank mp_size mp_group num_layers contiguous_data_buffers "
        "data_offsets contiguous_size_buffers size_offsets timers PARTITION_ACTIVATIONS CPU_CHECKPOINT "
        "CONTIGUOUS_CHECKPOINTING SYNCHRONIZE PROFILE_TIME detach_variable CudaRNGStatesTracker "
        "model_parallel_reconfigure_tp_seed get_partition_start get_partition_size "
        "gather_partitioned_activations extract_tensors merge_tensors is_activation_to_checkpoint "
        "partition_activations get_partitioned_activations_for_backward get_cpu_activations_for_backward "
        "get_offloaded_activations_for_backward restore_offloaded_activations CheckpointFunction "
        "partition_activations_in_checkpoint set_num_layers"
    ),
)
_ROLLOUT = (
    works(
        "dslaunch.runtime.compat.rollout",
        "RolloutBatch RolloutConfig RolloutEngine RolloutRequest SamplingConfig",
    ),
    mapped(
        "dslaunch.runtime.compat.rollout",
        "HybridEngineRollout",
        "each rank stops when its answers have ended; continuous batching is refused",
    ),
)
_DISTILLATION = (
    works("dslaunch.runtime.compat.distillation", "JSDLossOutput ResponseTokenBatch generalized_jsd_loss"),
)
_INIT = "models are made inside `with deepspeed.zero.Init()`, without any of torch's functions being replaced"

TRAINING: tuple[Module, ...] = (
    Module("deepspeed.runtime"),
    Module(
        "deepspeed.runtime.rollout",
        (*_ROLLOUT, *_DISTILLATION, works("dslaunch.runtime.compat.rollout", "build_rollout")),
    ),
    Module("deepspeed.runtime.rollout.base", (_ROLLOUT[0],)),
    Module(
        "deepspeed.runtime.rollout.hybrid_engine_rollout",
        (
            *_ROLLOUT,
            mapped(
                "dslaunch.runtime.compat.rollout",
                "HybridEngineRolloutConfig",
                "options of DeepSpeed's own loops are refused when on",
            ),
        ),
    ),
    Module("deepspeed.runtime.rollout.opsd", _DISTILLATION),
    Module(
        "deepspeed.zero",
        (
            *_ZERO,
            *_ZERO_TOP,
        ),
    ),
    Module(
        "deepspeed.runtime.zero",
        (
            *_ZERO,
            *_ZERO_TOP,
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
            works("dslaunch.runtime.compat.accelerator.current", "get_accelerator"),
            inside(
                "AllGatherCoalescedHandle AllGatherHandle AllReduceCoalescedHandle CUDAQuantizer "
                "DEFAULT_TENSOR_OVERRIDES DS_Z3_EAGER_FALLBACK_OWNER_ATTR "
                "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR DeepSpeedTensorOverride "
                "InsertPostInitMethodToModuleSubClasses MultipleAllGatherHandles NoGatherCoalescedHandle "
                "NoGatherHandle QuantizationInfo ZeroParamType debug_rank0 empty_buffers free_param "
                "get_all_subclasses get_allgather_dtype get_new_tensor_fn_for_dtype "
                "partitioned_param_data_shape print_rank_0 restore_init_context reuse_buffers "
                "shutdown_init_context temp_contiguous_tensor top_level_context "
                "unregister_external_parameter zero_init_context"
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.engine",
        (
            mapped(
                "dslaunch.runtime.compat.engine.getters",
                "DeepSpeedEngine",
                "what both kinds of engine are, for every configuration",
            ),
            works("typing", "DeepSpeedOptimizerCallable=Callable DeepSpeedSchedulerCallable=Callable"),
            inside(
                "MEMORY_OPT_ALLREDUCE_SIZE CASTABLE_DTYPES APEX_INSTALLED "
                "split_half_float_double_sparse EngineTimers"
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.base_optimizer",
        (
            mapped(
                "dslaunch.runtime.compat.engine.optimizer",
                "DeepSpeedOptimizer ZeROOptimizer=DeepSpeedOptimizer",
                _OPTIMIZER,
            ),
            inside("BackwardHookStateManager"),
        ),
    ),
    Module(
        "deepspeed.runtime.lr_schedules",
        (
            works(
                "dslaunch.runtime.step.lr_schedules",
                "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR",
            ),
            works(
                "dslaunch.drop_in.constants",
                "VALID_LR_SCHEDULES LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR",
            ),
            refused(
                INSIDE,
                "add_tuning_arguments parse_arguments get_config_from_args get_lr_from_config "
                "get_torch_optimizer override_1cycle_params override_lr_range_test_params override_params "
                "override_warmupCosineLR_params override_warmupLR_params update_lr",
                "makes a schedule of command-line arguments; write it into the ds_config",
            ),
            works(
                "dslaunch.drop_in.keys",
                "COS_MIN_RATIO CYCLE_FIRST_STAIR_COUNT CYCLE_FIRST_STEP_SIZE CYCLE_MAX_LR CYCLE_MAX_MOM "
                "CYCLE_MIN_LR CYCLE_MIN_MOM CYCLE_SECOND_STAIR_COUNT CYCLE_SECOND_STEP_SIZE DECAY_LR_RATE "
                "DECAY_MOM_RATE DECAY_STEP_SIZE EDGE_VALUE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STAIRCASE "
                "LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_SCHEDULE MID_VALUE TOTAL_NUM_STEPS "
                "WARMUP_MAX_LR WARMUP_MIN_LR WARMUP_MIN_RATIO WARMUP_NUM_STEPS WARMUP_TYPE "
                "WARMUP_LOG_RATE=LOG WARMUP_LINEAR_RATE=LINEAR",
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.dataloader",
        (works("dslaunch.runtime.data.loader", "RepeatingLoader DeepSpeedDataLoader=Loader"),),
    ),
    Module(
        "deepspeed.runtime.utils",
        (
            works("dslaunch.runtime.compat.seed", "set_random_seed"),
            works("dslaunch.runtime.compat.memory_report", "see_memory_usage get_ma_status empty_cache"),
            works("dslaunch.runtime.log", "call_to_str"),
            works(
                "dslaunch.runtime.compat.grad_norm",
                "clip_grad_norm_ get_global_norm get_global_norm_of_tensors clip_tensors_by_global_norm "
                "has_inf_or_nan is_invalid_grad_norm",
            ),
            works("dslaunch.runtime.compat.nested", "copy_to_device move_to_device get_tensor_bytes"),
            inside(
                "CheckOverflow DummyOptim OutputBackwardHookManager PartitionedTensor TLinear "
                "align_dense_tensors all_gather_dp_groups all_gather_into_tensor_dp_groups "
                "check_internal_apis_for_count_used_parameters combine_grad_norm_groups "
                "compare_tensors_in_structures count_used_parameters_in_backward ensure_directory_exists "
                "filter_empty_parameters get_checkpoint_folder_size get_flattened_grad_norm get_grad_zeros "
                "get_inactive_params get_norm_with_moe_layers get_norm_with_moe_layers_fast "
                "get_only_unique_item get_weight_norm is_model_parallel_parameter is_optimized_parameter "
                "is_transformers_cache mask_nan_or_inf_with_val_inplace maybe_loss_for_backward mem_alloced "
                "mem_cached memory_status noop_context noop_decorator offload_adam_states partition_balanced "
                "partition_uniform prefix_sum_inc register_output_backward_hooks reload_adam_states "
                "torch_max_memory_reserved torch_memory_reserved"
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.zero.stage_1_and_2",
        (
            works(
                "dslaunch.runtime.compat.estimate",
                "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_live "
                "estimate_zero2_model_states_mem_needs_all_cold",
            ),
            mapped(
                "dslaunch.runtime.compat.engine.optimizer",
                "DeepSpeedZeroOptimizer=DeepSpeedOptimizer",
                _OPTIMIZER,
            ),
            inside(
                "GradPartitionBufferGroup INITIAL_MICRO_STEP_ID IPGBucket OPTIMIZER_ALLGATHER_TIMER "
                "OPTIMIZER_GRADIENTS_TIMER OPTIMIZER_STEP_TIMER OPTIMIZER_TIMERS get_alignment_padding "
                "isclose lcm model_to_params pg_correctness_test print_rank_msg split_half_float_double"
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.zero.stage3",
        (
            works(
                "dslaunch.runtime.compat.estimate",
                "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_live "
                "estimate_zero3_model_states_mem_needs_all_cold",
            ),
            mapped(
                "dslaunch.runtime.compat.engine.optimizer",
                "DeepSpeedZeroOptimizer_Stage3=DeepSpeedOptimizer",
                _OPTIMIZER,
            ),
            inside(
                "INITIAL_MICRO_STEP_ID INIT_OPTIMIZER_TIMER IPGBucketZ3 OPTIMIZER_STEP_TIMER "
                "OPTIMIZER_SWAP_IN_STATE_TIMER OPTIMIZER_SWAP_OUT_STATE_TIMER isclose lcm model_to_params "
                "move_to_cpu pg_correctness_test print_rank_0"
            ),
            works("dslaunch.runtime.compat.generation", "unwrap_model_for_generation"),
        ),
    ),
    Module(
        "deepspeed.runtime.zero.tiling",
        (
            works("dslaunch.runtime.compat.tiled_linear", "TiledLinear TiledLinearReturnBias"),
            inside("partition split_tensor_along_last_dim"),
        ),
    ),
    Module(
        "deepspeed.runtime.zero.config",
        (
            works("dslaunch.runtime.compat.stage_names", "ZeroStageEnum"),
            inside(
                "DeepSpeedZeroConfig ZERO_FORMAT ZERO_OPTIMIZATION get_zero_config "
                "read_zero_config_deprecated"
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.zero.offload_config",
        (
            works("dslaunch.runtime.zero.model.offload_kinds", "OffloadDeviceEnum OffloadStateTypeEnum"),
            inside("DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig"),
        ),
    ),
    Module(
        "deepspeed.runtime.config",
        (
            works("dslaunch.runtime.errors", "DeepSpeedConfigError=ConfigError"),
            works(
                "dslaunch.drop_in.constants",
                " ".join(DEEPSPEED_CONSTANTS),
            ),
            inside(
                "ADAM_W_MODE ADAM_W_MODE_DEFAULT DEEPSPEED_OPTIMIZERS DeepSpeedConfig DeepSpeedConfigWriter "
                "DtypeEnum EXPERT_PARALLEL HybridEngineConfig MUADAMW_OPTIMIZER MUADAM_OPTIMIZER "
                "MUON_OPTIMIZER MUSGD_OPTIMIZER TENSOR_CORE_ALIGN_SIZE TORCH_ADAM_PARAM "
                "get_checkpoint_parallel_write_pipeline get_checkpoint_params "
                "get_checkpoint_tag_validation_mode get_communication_data_type get_data_types_params "
                "get_dataloader_drop_last get_disable_allgather get_disable_python_gc get_dump_state "
                "get_expert_data_topo_config get_expert_parallel_config get_gradient_accumulation_steps "
                "get_gradient_allreduce_op get_gradient_clipping get_gradient_predivide_factor "
                "get_hybrid_engine_config get_log_level get_lower_precision_safe_modules "
                "get_managed_gradient_accumulation get_memory_breakdown get_optimizer_gradient_clipping "
                "get_optimizer_legacy_fusion get_optimizer_name get_optimizer_params get_pipeline_config "
                "get_prescale_gradients get_scheduler_name get_scheduler_params get_steps_per_print "
                "get_torch_autocast_dtype get_torch_autocast_enabled get_train_batch_size "
                "get_train_micro_batch_size_per_gpu get_wall_clock_breakdown "
                "get_zero_allow_untested_optimizer get_zero_force_ds_cpu_optimizer"
            ),
        ),
    ),
    Module("deepspeed.runtime.fp16"),
    Module(
        "deepspeed.runtime.fp16.loss_scaler",
        (
            mapped(
                "dslaunch.drop_in.pickled",
                "LossScaler=LossScalerState DynamicLossScaler=LossScalerState LossScalerBase=LossScalerState",
                "holds what a checkpoint of DeepSpeed's says of it; the engine scales by itself",
            ),
            inside(
                "CONSECUTIVE_HYSTERESIS CreateLossScaler DELAYED_SHIFT INITIAL_LOSS_SCALE "
                "LOSS_SCALE_PROFILE_DEFAULTS LossScaleConfig LossScaleProfile LossScaleProfileDefaults "
                "MIN_LOSS_SCALE SCALE_WINDOW to_python_float"
            ),
        ),
    ),
    Module(
        "deepspeed.runtime.constants",
        (
            works(
                "dslaunch.drop_in.keys",
                "BFLOAT16=BF16 BFLOAT16_ENABLED=ENABLED BFLOAT16_IMMEDIATE_GRAD_UPDATE=IMMEDIATE_GRAD_UPDATE "
                "BFLOAT16_MASTER_WEIGHTS_AND_GRADS=BF16_MASTER_WEIGHTS_AND_GRADS BFLOAT16_OLD=BFLOAT16 "
                "BFLOAT16_OPTIMIZER_STATES=BF16_OPTIMIZER_STATES BUFFER_DTYPE CHECKPOINT "
                "CHECKPOINT_PARALLEL_WRITE=PARALLEL_WRITE "
                "CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE=PIPELINE_STAGE "
                "CHECKPOINT_TAG_VALIDATION=TAG_VALIDATION CHECK_OVERFLOW COMMUNICATION_DATA_TYPE "
                "DATALOADER_DROP_LAST DATA_PARALLEL_GROUP DATA_TYPES DDP_BFLOAT16=DDP_BF16 DISABLE_ALLGATHER "
                "DISABLE_PYTHON_GC DUMP_STATE FP16 FP16_AUTO_CAST=AUTO_CAST "
                "FP16_CONSECUTIVE_HYSTERESIS=CONSECUTIVE_HYSTERESIS FP16_ENABLED=ENABLED "
                "FP16_HYSTERESIS=HYSTERESIS FP16_INITIAL_SCALE_POWER=INITIAL_SCALE_POWER "
                "FP16_LOSS_SCALE=LOSS_SCALE FP16_LOSS_SCALE_WINDOW=LOSS_SCALE_WINDOW "
                "FP16_MASTER_WEIGHTS_AND_GRADS FP16_MIN_LOSS_SCALE=MIN_LOSS_SCALE GLOBAL_RANK "
                "GRADIENT_ACCUMULATION_STEPS GRADIENT_ALLREDUCE_OP GRADIENT_ALLREDUCE_OP_MEAN=MEAN "
                "GRADIENT_ALLREDUCE_OP_SUM=SUM GRADIENT_CLIPPING GRADIENT_PREDIVIDE_FACTOR GRAD_ACCUM_DTYPE "
                "KEEP_IN_FP32_MODULES LEGACY_FUSION LOAD_UNIVERSAL_CHECKPOINT=LOAD_UNIVERSAL LOG_LEVEL "
                "MANAGED_GRADIENT_ACCUMULATION MAX_GRAD_NORM MEMORY_BREAKDOWN OPTIMIZER "
                "OPTIMIZER_PARAMS=PARAMS PARAM_DTYPE PIPE_REPLICATED=DS_PIPE_REPLICATED PRESCALE_GRADIENTS "
                "ROUTE_ENCODE=ENCODE ROUTE_EVAL=EVAL ROUTE_PREDICT=PREDICT ROUTE_TRAIN=TRAIN SCHEDULER "
                "SCHEDULER_PARAMS=PARAMS SEQ_PARALLEL_COMMUNICATION_DATA_TYPE STEPS_PER_PRINT TORCH_AUTOCAST "
                "TORCH_AUTOCAST_DTYPE=DTYPE TORCH_AUTOCAST_ENABLED=ENABLED "
                "TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES=LOWER_PRECISION_SAFE_MODULES TRAIN_BATCH_SIZE "
                "TRAIN_MICRO_BATCH_SIZE_PER_GPU TYPE "
                "USE_DATA_BEFORE_EXPERT_PARALLEL=USE_DATA_BEFORE_EXPERT_PARALLELISM "
                "USE_NODE_LOCAL_STORAGE_CHECKPOINT=USE_NODE_LOCAL_STORAGE VOCABULARY_SIZE "
                "WALL_CLOCK_BREAKDOWN ZERO_ALLOW_UNTESTED_OPTIMIZER ZERO_FORCE_DS_CPU_OPTIMIZER",
            ),
            inside(
                "BFLOAT16_CHECK_OVERFLOW_DEFAULT BFLOAT16_ENABLED_DEFAULT BFLOAT16_FORMAT "
                "BFLOAT16_IMMEDIATE_GRAD_UPDATE_DEFAULT BFLOAT16_MASTER_WEIGHTS_AND_GRADS_DEFAULT "
                "BFLOAT16_OPTIMIZER_STATES_DEFAULT BUFFER_DTYPE_DEFAULT "
                "CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE_DEFAULT CHECKPOINT_TAG_VALIDATION_DEFAULT "
                "CHECKPOINT_TAG_VALIDATION_MODES COMMUNICATION_DATA_TYPE_DEFAULT "
                "COMMUNICATION_DATA_TYPE_FORMAT DATALOADER_DROP_LAST_DEFAULT DATALOADER_DROP_LAST_FORMAT "
                "DISABLE_ALLGATHER_DEFAULT DISABLE_ALLGATHER_FORMAT DISABLE_PYTHON_GC_DEFAULT "
                "DISABLE_PYTHON_GC_FORMAT DUMP_STATE_DEFAULT DUMP_STATE_FORMAT FP16_AUTO_CAST_DEFAULT "
                "FP16_CONSECUTIVE_HYSTERESIS_DEFAULT FP16_ENABLED_DEFAULT FP16_FORMAT "
                "FP16_HYSTERESIS_DEFAULT FP16_INITIAL_SCALE_POWER_DEFAULT FP16_LOSS_SCALE_DEFAULT "
                "FP16_LOSS_SCALE_WINDOW_DEFAULT FP16_MASTER_WEIGHTS_AND_GRADS_DEFAULT "
                "FP16_MIN_LOSS_SCALE_DEFAULT GRADIENT_ACCUMULATION_FORMAT "
                "GRADIENT_ACCUMULATION_STEPS_DEFAULT GRADIENT_ALLREDUCE_OP_DEFAULT "
                "GRADIENT_ALLREDUCE_OP_FORMAT GRADIENT_ALLREDUCE_OP_SUPPORTED GRADIENT_CLIPPING_DEFAULT "
                "GRADIENT_CLIPPING_FORMAT GRADIENT_PREDIVIDE_FACTOR_DEFAULT GRADIENT_PREDIVIDE_FACTOR_FORMAT "
                "GRAD_ACCUM_DTYPE_DEFAULT KEEP_IN_FP32_MODULES_DEFAULT LEGACY_FUSION_DEFAULT "
                "LOAD_UNIVERSAL_CHECKPOINT_DEFAULT LOG_LEVEL_DEFAULT MANAGED_GRADIENT_ACCUMULATION_DEFAULT "
                "MEMORY_BREAKDOWN_DEFAULT OPTIMIZER_TYPE_DEFAULT PARAM_DTYPE_DEFAULT "
                "PRESCALE_GRADIENTS_DEFAULT PRESCALE_GRADIENTS_FORMAT SCHEDULER_TYPE_DEFAULT "
                "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_FORMAT "
                "STEPS_PER_PRINT_DEFAULT TORCH_AUTOCAST_ENABLED_DEFAULT TORCH_AUTOCAST_FORMAT "
                "TRAIN_BATCH_SIZE_DEFAULT TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT "
                "USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT USE_NODE_LOCAL_STORAGE_CHECKPOINT_DEFAULT "
                "VOCABULARY_SIZE_DEFAULT VOCABULARY_SIZE_FORMAT ValidationMode WALL_CLOCK_BREAKDOWN_DEFAULT "
                "WALL_CLOCK_BREAKDOWN_FORMAT ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT "
                "ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT"
            ),
        ),
    ),
    Module("deepspeed.checkpointing", _CHECKPOINTING),
    Module("deepspeed.runtime.activation_checkpointing"),
    Module("deepspeed.runtime.activation_checkpointing.checkpointing", _CHECKPOINTING),
    Module(
        "deepspeed.runtime.activation_checkpointing.offload_activations",
        (
            works(
                "dslaunch.runtime.compat.checkpoint_inputs",
                "CheckpointHiddenStatesOffload get_checkpoint_hidden_states_offloading_ctx_manager",
            ),
            inside("CheckpointActivationOffloadStats patch_gradient_checkpointing_layer_marker"),
        ),
    ),
)

"""Names that a module of DeepSpeed 0.19.8 has because it imports them from another one: programs take them
from either.

By module, and by the module that they come from; "here=there" has another name there. Only of modules of
which there is something here. Read when a module is asked for a name that it has no line for.
`python tests/drop_in/test_names.py` writes it.
"""

from __future__ import annotations

PASSED_ON: dict[str, dict[str, str]] = {
    "deepspeed.comm.comm": {
        "deepspeed.comm.ccl": "CCLBackend",
        "deepspeed.comm.constants": (
            "CCL_BACKEND COMMS_LOGGER COMMS_LOGGER_DEBUG COMMS_LOGGER_DEBUG_DEFAULT COMMS_LOGGER_ENABLED "
            "COMMS_LOGGER_ENABLED_DEFAULT COMMS_LOGGER_FORMAT COMMS_LOGGER_PROF_ALL "
            "COMMS_LOGGER_PROF_ALL_DEFAULT COMMS_LOGGER_PROF_OPS COMMS_LOGGER_PROF_OPS_DEFAULT "
            "COMMS_LOGGER_VERBOSE COMMS_LOGGER_VERBOSE_DEFAULT DEFAULT_AML_MASTER_PORT "
            "DEFAULT_AML_NCCL_SOCKET_IFNAME GLOO_BACKEND HCCL_BACKEND MPI_BACKEND NCCL_BACKEND SCCL_BACKEND"
        ),
        "deepspeed.utils.comms_logging": "CommsLogger",
        "deepspeed.runtime.config": "DeepSpeedConfig",
        "deepspeed.constants": "TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.utils": "get_caller_func",
        "deepspeed.comm.utils": (
            "get_debug_log_name get_default_args get_local_rank_from_launcher get_msg_size_from_args "
            "get_tensor_kwarg get_tensor_position get_world_rank_from_launcher get_world_size_from_launcher"
        ),
    },
    "deepspeed.git_version_info": {
        "deepspeed.ops.op_builder.all_ops": "ALL_OPS",
    },
    "deepspeed.inference.config": {
        "deepspeed.runtime.config_utils": "DeepSpeedConfigModel",
        "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig",
    },
    "deepspeed.inference.engine": {
        "deepspeed.module_inject.auto_tp": "AutoTP",
        "deepspeed.module_inject.tp_shard": "AutoTPMeta",
        "deepspeed.ops.transformer.inference.ds_attention": "DeepSpeedSelfAttention",
        "deepspeed.model_implementations.transformers.ds_transformer": "DeepSpeedTransformerInference",
        "deepspeed.module_inject": (
            "LinearAllreduce LinearLayer Normalize ReplaceWithTensorSlicing generic_injection "
            "replace_transformer_layer"
        ),
        "deepspeed.pipe": "PipelineModule",
        "deepspeed.runtime.state_dict_factory": "SDLoaderFactory",
        "deepspeed.utils.timer": "SynchronizedWallClockTimer",
        "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": "TorchCheckpointEngine",
        "deepspeed.module_inject.policy": "TransformerPolicy",
        "deepspeed.runtime.weight_quantizer": "WeightQuantization",
        "deepspeed.module_inject.auto_tp_model_utils": (
            "build_bloom_alibi_tensor build_mpt_alibi_tensor build_mpt_atten_bias_tensor get_alibi_mask "
            "get_head_shard_sizes install_head_sharded_helper"
        ),
        "deepspeed.module_inject.replace_policy": "generic_policies",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.moe.utils": "has_moe_layers",
        "deepspeed.comm.comm": "init_distributed",
        "deepspeed.runtime.compiler": "is_compile_supported",
        "deepspeed.utils.logging": "log_dist",
    },
    "deepspeed.launcher.launch": {
        "deepspeed.constants": "CROSS_RANK CROSS_SIZE TORCH_DISTRIBUTED_DEFAULT_PORT",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.utils": "get_numactl_cmd logger set_log_level_from_string",
    },
    "deepspeed.launcher.runner": {
        "deepspeed.autotuning": "Autotuner",
        "deepspeed.launcher.multinode_runner": (
            "IMPIRunner MPICHRunner MVAPICHRunner OpenMPIRunner PDSHRunner SlurmRunner"
        ),
        "deepspeed.launcher.constants": (
            "IMPI_LAUNCHER MPICH_LAUNCHER MVAPICH_LAUNCHER OPENMPI_LAUNCHER PDSH_LAUNCHER SLURM_LAUNCHER"
        ),
        "deepspeed.constants": "TORCH_DISTRIBUTED_DEFAULT_PORT",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.utils": "logger set_log_level_from_string",
    },
    "deepspeed.monitor.config": {
        "deepspeed.runtime.config_utils": "DeepSpeedConfigModel",
    },
    "deepspeed.monitor.csv_monitor": {
        "deepspeed.monitor.monitor": "Monitor",
    },
    "deepspeed.monitor.monitor": {
        "deepspeed.monitor.comet": "CometMonitor",
        "deepspeed.monitor.tensorboard": "TensorBoardMonitor",
        "deepspeed.monitor.wandb": "WandbMonitor",
        "deepspeed.monitor.csv_monitor": "csvMonitor",
    },
    "deepspeed.monitor.tensorboard": {
        "deepspeed.monitor.monitor": "Monitor",
        "deepspeed.monitor.utils": "check_tb_availability",
    },
    "deepspeed.monitor.wandb": {
        "deepspeed.monitor.monitor": "Monitor",
        "deepspeed.monitor.utils": "check_wandb_availability",
    },
    "deepspeed.ops.adagrad.cpu_adagrad": {
        "deepspeed.ops.op_builder": "CPUAdagradBuilder",
        "deepspeed.utils.logging": "should_log_le",
    },
    "deepspeed.ops.adam.cpu_adam": {
        "deepspeed.ops.op_builder": "CPUAdamBuilder",
        "deepspeed.utils": "logger",
        "deepspeed.utils.logging": "should_log_le",
    },
    "deepspeed.ops.adam.fused_adam": {
        "deepspeed.ops.op_builder": "FusedAdamBuilder",
        "deepspeed.ops.adam.multi_tensor_apply": "MultiTensorApply",
        "deepspeed.accelerator": "get_accelerator",
    },
    "deepspeed.ops.lamb.fused_lamb": {
        "deepspeed.ops.op_builder": "FusedLambBuilder",
    },
    "deepspeed.ops.lion.cpu_lion": {
        "deepspeed.ops.op_builder": "CPULionBuilder",
        "deepspeed.utils": "logger",
        "deepspeed.utils.logging": "should_log_le",
    },
    "deepspeed.ops.lion.fused_lion": {
        "deepspeed.ops.op_builder": "FusedLionBuilder",
        "deepspeed.ops.lion.multi_tensor_apply": "MultiTensorApply",
        "deepspeed.accelerator": "get_accelerator",
    },
    "deepspeed.profiling.flops_profiler.profiler": {
        "deepspeed.utils.timer": "BACKWARD_GLOBAL_TIMER FORWARD_GLOBAL_TIMER STEP_GLOBAL_TIMER",
        "deepspeed.moe.layer": "MoE",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.utils": "logger",
        "deepspeed.utils.torch": "required_torch_version",
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "deepspeed.runtime.config": "DeepSpeedConfig",
        "deepspeed.utils.timer": "FORWARD_GLOBAL_TIMER Timers=SynchronizedWallClockTimer",
        "deepspeed.utils.bwc": "bwc_tensor_model_parallel_rank",
        "deepspeed.runtime.utils": "copy_to_device move_to_device see_memory_usage",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.utils": "logger",
    },
    "deepspeed.runtime.activation_checkpointing.offload_activations": {
        "deepspeed.accelerator": "get_accelerator",
    },
    "deepspeed.runtime.base_optimizer": {
        "deepspeed.runtime.utils": "bwc_tensor_model_parallel_rank maybe_loss_for_backward see_memory_usage",
        "deepspeed.runtime.torch_autocast": "get_comm_dtype is_autocast_initialized",
        "deepspeed.utils": "logger",
        "deepspeed.utils.tensor_fragment": "map_to_flat_opt_states",
    },
    "deepspeed.runtime.config": {
        "deepspeed.runtime.constants": (
            "BFLOAT16 BFLOAT16_CHECK_OVERFLOW_DEFAULT BFLOAT16_ENABLED BFLOAT16_ENABLED_DEFAULT "
            "BFLOAT16_FORMAT BFLOAT16_IMMEDIATE_GRAD_UPDATE BFLOAT16_IMMEDIATE_GRAD_UPDATE_DEFAULT "
            "BFLOAT16_MASTER_WEIGHTS_AND_GRADS BFLOAT16_MASTER_WEIGHTS_AND_GRADS_DEFAULT BFLOAT16_OLD "
            "BFLOAT16_OPTIMIZER_STATES BFLOAT16_OPTIMIZER_STATES_DEFAULT BUFFER_DTYPE BUFFER_DTYPE_DEFAULT "
            "CHECKPOINT CHECKPOINT_PARALLEL_WRITE CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE "
            "CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE_DEFAULT CHECKPOINT_TAG_VALIDATION "
            "CHECKPOINT_TAG_VALIDATION_DEFAULT CHECKPOINT_TAG_VALIDATION_MODES CHECK_OVERFLOW "
            "COMMUNICATION_DATA_TYPE COMMUNICATION_DATA_TYPE_DEFAULT COMMUNICATION_DATA_TYPE_FORMAT "
            "DATALOADER_DROP_LAST DATALOADER_DROP_LAST_DEFAULT DATALOADER_DROP_LAST_FORMAT "
            "DATA_PARALLEL_GROUP DATA_TYPES DDP_BFLOAT16 DISABLE_ALLGATHER DISABLE_ALLGATHER_DEFAULT "
            "DISABLE_ALLGATHER_FORMAT DISABLE_PYTHON_GC DISABLE_PYTHON_GC_DEFAULT DISABLE_PYTHON_GC_FORMAT "
            "DUMP_STATE DUMP_STATE_DEFAULT DUMP_STATE_FORMAT FP16 FP16_AUTO_CAST FP16_AUTO_CAST_DEFAULT "
            "FP16_CONSECUTIVE_HYSTERESIS FP16_CONSECUTIVE_HYSTERESIS_DEFAULT FP16_ENABLED "
            "FP16_ENABLED_DEFAULT FP16_FORMAT FP16_HYSTERESIS FP16_HYSTERESIS_DEFAULT "
            "FP16_INITIAL_SCALE_POWER FP16_INITIAL_SCALE_POWER_DEFAULT FP16_LOSS_SCALE "
            "FP16_LOSS_SCALE_DEFAULT FP16_LOSS_SCALE_WINDOW FP16_LOSS_SCALE_WINDOW_DEFAULT "
            "FP16_MASTER_WEIGHTS_AND_GRADS FP16_MASTER_WEIGHTS_AND_GRADS_DEFAULT FP16_MIN_LOSS_SCALE "
            "FP16_MIN_LOSS_SCALE_DEFAULT GLOBAL_RANK GRADIENT_ACCUMULATION_FORMAT "
            "GRADIENT_ACCUMULATION_STEPS GRADIENT_ACCUMULATION_STEPS_DEFAULT GRADIENT_ALLREDUCE_OP "
            "GRADIENT_ALLREDUCE_OP_DEFAULT GRADIENT_ALLREDUCE_OP_FORMAT GRADIENT_ALLREDUCE_OP_MEAN "
            "GRADIENT_ALLREDUCE_OP_SUM GRADIENT_ALLREDUCE_OP_SUPPORTED GRADIENT_CLIPPING "
            "GRADIENT_CLIPPING_DEFAULT GRADIENT_CLIPPING_FORMAT GRADIENT_PREDIVIDE_FACTOR "
            "GRADIENT_PREDIVIDE_FACTOR_DEFAULT GRADIENT_PREDIVIDE_FACTOR_FORMAT GRAD_ACCUM_DTYPE "
            "GRAD_ACCUM_DTYPE_DEFAULT KEEP_IN_FP32_MODULES KEEP_IN_FP32_MODULES_DEFAULT LEGACY_FUSION "
            "LEGACY_FUSION_DEFAULT LOAD_UNIVERSAL_CHECKPOINT LOAD_UNIVERSAL_CHECKPOINT_DEFAULT LOG_LEVEL "
            "LOG_LEVEL_DEFAULT MANAGED_GRADIENT_ACCUMULATION MANAGED_GRADIENT_ACCUMULATION_DEFAULT "
            "MAX_GRAD_NORM MEMORY_BREAKDOWN MEMORY_BREAKDOWN_DEFAULT OPTIMIZER OPTIMIZER_PARAMS "
            "OPTIMIZER_TYPE_DEFAULT PARAM_DTYPE PARAM_DTYPE_DEFAULT PIPE_REPLICATED PRESCALE_GRADIENTS "
            "PRESCALE_GRADIENTS_DEFAULT PRESCALE_GRADIENTS_FORMAT ROUTE_ENCODE ROUTE_EVAL ROUTE_PREDICT "
            "ROUTE_TRAIN SCHEDULER SCHEDULER_PARAMS SCHEDULER_TYPE_DEFAULT "
            "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT "
            "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_FORMAT STEPS_PER_PRINT STEPS_PER_PRINT_DEFAULT "
            "TORCH_AUTOCAST TORCH_AUTOCAST_DTYPE TORCH_AUTOCAST_ENABLED TORCH_AUTOCAST_ENABLED_DEFAULT "
            "TORCH_AUTOCAST_FORMAT TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES TRAIN_BATCH_SIZE "
            "TRAIN_BATCH_SIZE_DEFAULT TRAIN_MICRO_BATCH_SIZE_PER_GPU TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT "
            "TYPE USE_DATA_BEFORE_EXPERT_PARALLEL USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT "
            "USE_NODE_LOCAL_STORAGE_CHECKPOINT USE_NODE_LOCAL_STORAGE_CHECKPOINT_DEFAULT VOCABULARY_SIZE "
            "VOCABULARY_SIZE_DEFAULT VOCABULARY_SIZE_FORMAT ValidationMode WALL_CLOCK_BREAKDOWN "
            "WALL_CLOCK_BREAKDOWN_DEFAULT WALL_CLOCK_BREAKDOWN_FORMAT ZERO_ALLOW_UNTESTED_OPTIMIZER "
            "ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT ZERO_FORCE_DS_CPU_OPTIMIZER "
            "ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT"
        ),
        "deepspeed.runtime.data_pipeline.constants": (
            "CURRICULUM_LEARNING CURRICULUM_LEARNING_BATCH CURRICULUM_LEARNING_CLUSTERING_TYPE "
            "CURRICULUM_LEARNING_CLUSTER_PATH CURRICULUM_LEARNING_CLUSTER_PREFIX "
            "CURRICULUM_LEARNING_CONSUMED_SAMPLES CURRICULUM_LEARNING_CURRENT_DIFFICULTIES "
            "CURRICULUM_LEARNING_CURRENT_DIFFICULTY CURRICULUM_LEARNING_DATA_CLUSTER_CURRENT_POSITION "
            "CURRICULUM_LEARNING_DATA_CLUSTER_PATHS CURRICULUM_LEARNING_DIFFICULTY_TYPE "
            "CURRICULUM_LEARNING_ENABLED CURRICULUM_LEARNING_ENABLED_DEFAULT "
            "CURRICULUM_LEARNING_MAX_DIFFICULTY CURRICULUM_LEARNING_METRICS CURRICULUM_LEARNING_METRIC_PATH "
            "CURRICULUM_LEARNING_MIN_DIFFICULTY CURRICULUM_LEARNING_NP_RNG_STATE "
            "CURRICULUM_LEARNING_PERCENTILE_BASED CURRICULUM_LEARNING_SAMPLE_PATH "
            "CURRICULUM_LEARNING_SCHEDULE_CONFIG CURRICULUM_LEARNING_SCHEDULE_CUSTOM "
            "CURRICULUM_LEARNING_SCHEDULE_DIFFICULTY CURRICULUM_LEARNING_SCHEDULE_DIFFICULTY_STEP "
            "CURRICULUM_LEARNING_SCHEDULE_FIXED_DISCRETE CURRICULUM_LEARNING_SCHEDULE_FIXED_LINEAR "
            "CURRICULUM_LEARNING_SCHEDULE_FIXED_ROOT CURRICULUM_LEARNING_SCHEDULE_MAX_STEP "
            "CURRICULUM_LEARNING_SCHEDULE_ROOT_DEGREE CURRICULUM_LEARNING_SCHEDULE_TOTAL_STEP "
            "CURRICULUM_LEARNING_SCHEDULE_TYPE CURRICULUM_LEARNING_SINGLE_CLUSTER CURRICULUM_LEARNING_STEP "
            "CURRICULUM_LEARNING_VALUE_BASED DATA_EFFICIENCY DATA_EFFICIENCY_ENABLED "
            "DATA_EFFICIENCY_ENABLED_DEFAULT DATA_EFFICIENCY_SEED DATA_EFFICIENCY_SEED_DEFAULT DATA_ROUTING "
            "DATA_ROUTING_ENABLED DATA_ROUTING_ENABLED_DEFAULT DATA_SAMPLING DATA_SAMPLING_ENABLED "
            "DATA_SAMPLING_ENABLED_DEFAULT DATA_SAMPLING_NUM_EPOCHS DATA_SAMPLING_NUM_EPOCHS_DEFAULT "
            "DATA_SAMPLING_NUM_WORKERS DATA_SAMPLING_NUM_WORKERS_DEFAULT DATA_SAMPLING_PIN_MEMORY "
            "DATA_SAMPLING_PIN_MEMORY_DEFAULT DYNAMIC_BATCHING DYNAMIC_BATCHING_ENABLED "
            "DYNAMIC_BATCHING_ENABLED_DEFAULT DYNAMIC_BATCHING_LR_SCALING_METHOD "
            "DYNAMIC_BATCHING_LR_SCALING_METHOD_DEFAULT DYNAMIC_BATCHING_MAX_BATCH_SIZE "
            "DYNAMIC_BATCHING_MAX_BATCH_SIZE_DEFAULT DYNAMIC_BATCHING_MAX_TOKENS "
            "DYNAMIC_BATCHING_METRICS_PATH DYNAMIC_BATCHING_MIN_BATCH_SIZE "
            "DYNAMIC_BATCHING_MIN_BATCH_SIZE_DEFAULT DYNAMIC_BATCHING_SEQUENCE_PICKING_ORDER "
            "DYNAMIC_BATCHING_SEQUENCE_PICKING_ORDER_DEFAULT DYNAMIC_BATCHING_VERBOSE RANDOM_LTD "
            "RANDOM_LTD_ATTENTION_MASK RANDOM_LTD_CONSUMED_LAYER_TOKENS RANDOM_LTD_CURRENT_VALUE "
            "RANDOM_LTD_CURR_STEP RANDOM_LTD_ENABLED RANDOM_LTD_ENABLED_DEFAULT RANDOM_LTD_GLOBAL_BATCH_SIZE "
            "RANDOM_LTD_HIDDEN_STATE_ORDER RANDOM_LTD_INCREASE_STEP RANDOM_LTD_LAYER_ID RANDOM_LTD_LAYER_NUM "
            "RANDOM_LTD_LAYER_TOKEN_LR_ENABLED RANDOM_LTD_LAYER_TOKEN_LR_ENABLED_DEFAULT "
            "RANDOM_LTD_LAYER_TOKEN_LR_SCHEDULE RANDOM_LTD_MAX_VALUE RANDOM_LTD_MICRO_BATCH_SIZE "
            "RANDOM_LTD_MIN_VALUE RANDOM_LTD_MODEL_MASK_NAME RANDOM_LTD_MODEL_TYPE RANDOM_LTD_REQUIRE_STEP "
            "RANDOM_LTD_SAMPLE_INDEX RANDOM_LTD_SCHEDULER RANDOM_LTD_SCHEDULER_TYPE "
            "RANDOM_LTD_SCHEDULE_CONFIG RANDOM_LTD_TOTAL_LAYER_NUM RANDOM_LTD_TOTAL_LAYER_TOKENS "
            "RANDOM_LTD_WARMUP_LAYER_TOKENS RANDOM_LTD_WARMUP_TYPE"
        ),
        "deepspeed.compile.config": "CompileConfig",
        "deepspeed.runtime.activation_checkpointing.config": "DeepSpeedActivationCheckpointingConfig",
        "deepspeed.autotuning.config": "DeepSpeedAutotuningConfig",
        "deepspeed.comm.config": "DeepSpeedCommsConfig",
        "deepspeed.runtime.config_utils": (
            "DeepSpeedConfigModel ScientificNotationEncoder dict_raise_error_on_duplicate_keys "
            "get_scalar_param"
        ),
        "deepspeed.datastates.config": "DeepSpeedDataStatesConfig",
        "deepspeed.profiling.config": "DeepSpeedFlopsProfilerConfig",
        "deepspeed.inference.config": "WeightQuantConfig",
        "deepspeed.runtime.zero.config": "ZeroStageEnum get_zero_config",
        "deepspeed.runtime.swap_tensor.aio_config": "get_aio_config",
        "deepspeed.runtime.precision_config": "get_bfloat16_config get_float16_config",
        "deepspeed.runtime.model_checkpointing.config": "get_checkpoint_config",
        "deepspeed.runtime.data_pipeline.config": "get_data_efficiency_config get_data_efficiency_enabled",
        "deepspeed.monitor.config": "get_monitor_config",
        "deepspeed.runtime.tensor_parallel": "get_tensor_parallel_config",
        "deepspeed.utils.config": "get_timers_config",
        "deepspeed.utils": "logger",
    },
    "deepspeed.runtime.constants": {
        "deepspeed.accelerator": "get_accelerator",
    },
    "deepspeed.runtime.dataloader": {
        "deepspeed.runtime.data_pipeline.constants": (
            "CURRICULUM_LEARNING DATA_EFFICIENCY DATA_SAMPLING_NUM_WORKERS"
        ),
        "deepspeed.runtime.constants": "DATA_PARALLEL_GROUP GLOBAL_RANK GRADIENT_ACCUMULATION_STEPS",
        "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": "DeepSpeedDataSampler",
        "deepspeed.accelerator": "get_accelerator",
    },
    "deepspeed.runtime.engine": {
        "deepspeed.runtime.config": (
            "ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER ADAM_W_MODE ADAM_W_MODE_DEFAULT "
            "DEEPSPEED_OPTIMIZERS DtypeEnum LAMB_OPTIMIZER LION_OPTIMIZER MUADAMW_OPTIMIZER MUADAM_OPTIMIZER "
            "MUON_OPTIMIZER MUSGD_OPTIMIZER TORCH_ADAM_PARAM"
        ),
        "deepspeed.checkpoint.constants": (
            "AFFINE_MAP AFFINE_MAP_PARAMS AFFINE_MAP_VERSION AUTOEP_AFFINE_MAPS AUTOEP_EXPERT_PLACEMENT "
            "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION "
            "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION_KEY AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT "
            "CHECKPOINT_PARALLEL_DIMS CHECKPOINT_PP_DEGREE CHECKPOINT_TP_DEGREE DS_AUTOEP_UC_META "
            "EXPERT_PARAMETER_PATTERNS FOLDING_METADATA_KEY FROZEN_PARAM_FRAGMENTS OPTIMIZER_STATE_DICT "
            "UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE"
        ),
        "deepspeed.checkpoint.affine": "AFFINE_MAP_FORMAT_VERSION",
        "deepspeed.utils.timer": (
            "BACKWARD_GLOBAL_TIMER BACKWARD_INNER_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER "
            "BACKWARD_MICRO_TIMER BACKWARD_REDUCE_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER "
            "FORWARD_GLOBAL_TIMER FORWARD_MICRO_TIMER NoopTimer STEP_GLOBAL_TIMER STEP_MICRO_TIMER "
            "SynchronizedWallClockTimer ThroughputTimer"
        ),
        "deepspeed.runtime.bf16_optimizer": "BF16_Optimizer",
        "deepspeed.runtime.constants": (
            "BFLOAT16 DATA_PARALLEL_GROUP DDP_BFLOAT16 FP16 GLOBAL_RANK GRADIENT_ACCUMULATION_STEPS "
            "GRADIENT_ALLREDUCE_OP_MEAN ROUTE_EVAL ROUTE_PREDICT ROUTE_TRAIN"
        ),
        "deepspeed.runtime.model_checkpointing.constants": (
            "CHECKPOINT_SERIALIZATION CHECKPOINT_TAG_VALIDATION CHECKPOINT_WRITER ValidationMode"
        ),
        "deepspeed.runtime.data_pipeline.constants": (
            "CURRICULUM_LEARNING CURRICULUM_LEARNING_ENABLED DATA_EFFICIENCY DATA_ROUTING DATA_SAMPLING "
            "DATA_SAMPLING_ENABLED DATA_SAMPLING_NUM_WORKERS RANDOM_LTD RANDOM_LTD_ENABLED "
            "RANDOM_LTD_GLOBAL_BATCH_SIZE RANDOM_LTD_LAYER_ID RANDOM_LTD_LAYER_NUM "
            "RANDOM_LTD_LAYER_TOKEN_LR_ENABLED RANDOM_LTD_LAYER_TOKEN_LR_SCHEDULE "
            "RANDOM_LTD_MICRO_BATCH_SIZE"
        ),
        "deepspeed.runtime.checkpoint_engine": (
            "CheckpointCommitInfo TorchCheckpointEngine create_checkpoint_engine"
        ),
        "deepspeed.runtime.dataloader": "DeepSpeedDataLoader",
        "deepspeed.runtime.zero.parameter_offload": (
            "DeepSpeedZeRoOffload ZeROOrderedDict ensure_zero_ordered_dict"
        ),
        "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
        "deepspeed.runtime.utils": (
            "DummyOptim check_internal_apis_for_count_used_parameters clip_grad_norm_ "
            "compare_tensors_in_structures get_ma_status is_optimized_parameter maybe_loss_for_backward "
            "register_output_backward_hooks see_memory_usage"
        ),
        "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
        "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
        "deepspeed.profiling.flops_profiler.profiler": "FlopsProfiler",
        "deepspeed.ops.adam": "FusedAdam",
        "deepspeed.module_inject.layers": (
            "GatherReplacedLayerParams collect_autotp_universal_checkpoint_info "
            "configure_tensor_parallel_runtime"
        ),
        "deepspeed.linear.optimized_linear": "LoRAOptimizedLinear",
        "deepspeed.runtime.fp16.loss_scaler": "LossScaleConfig LossScaleProfile",
        "deepspeed.moe.sharded_moe": "MOELayer TopKGate",
        "deepspeed.moe.layer": "MoE",
        "deepspeed.monitor.monitor": "MonitorMaster",
        "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
        "deepspeed.runtime.pipe.module": "PipelineModule",
        "deepspeed.runtime.data_pipeline.data_routing.scheduler": "RandomLTDScheduler",
        "deepspeed.runtime.data_pipeline.data_routing.basic_layer": "RandomLayerTokenDrop",
        "deepspeed.runtime.sparse_tensor": "SparseTensor",
        "deepspeed.runtime.zero.config": "ZERO_OPTIMIZATION ZeroStageEnum",
        "deepspeed.runtime.base_optimizer": "ZeROOptimizer",
        "deepspeed.runtime.zero.utils": "ZeRORuntimeException is_zero_supported_optimizer",
        "deepspeed.runtime.zenflow.zenflow_stage_1_and_2": "ZenFlowZeroOptimizer",
        "deepspeed.runtime.zero.partition_parameters": "ZeroParamStatus",
        "deepspeed.utils.z3_leaf_module": "apply_zero_leaf_module_config",
        "deepspeed.runtime.torch_autocast": (
            "autocast_if_enabled get_default_autocast_lower_precision_modules init_autocast_params"
        ),
        "deepspeed.checkpoint.autoep_affine": "autoep_experts_for_rank",
        "deepspeed.runtime.keep_in_fp32": "buffers_to_keep_in_fp32 keep_buffers_in_fp32 keep_in_fp32_pattern",
        "deepspeed.module_inject.auto_ep_folding": (
            "clear_autoep_folding_gradient_corrected is_autoep_folding_gradient_corrected "
            "reduce_autoep_folding_gradient"
        ),
        "deepspeed.checkpoint.utils": "clone_tensors_for_torch_save",
        "deepspeed.runtime.compiler": "compiled_autograd is_compile_supported",
        "deepspeed.moe.utils": "configure_moe_param_groups is_moe_param",
        "deepspeed.runtime.zenflow.engine": (
            "configure_zenflow is_zenflow_update_boundary sync_zenflow_optimizer_lr zenflow_step"
        ),
        "deepspeed.utils.debug": "debug_clear_module_and_param_names debug_extract_module_and_param_names",
        "deepspeed.compile.util": (
            "deepcompile_backward_epilogue deepcompile_backward_prologue get_deepcompile_handle "
            "is_deepcompile_supported"
        ),
        "deepspeed.compile.z3_eager_fallback": "deepcompile_z3_forward_context",
        "deepspeed.checkpoint.ds_to_universal": "dp_index_to_str",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint",
        "deepspeed.utils": "instrument_w_nvtx log_dist log_dist_once logger",
        "deepspeed.checkpoint.autoep_zero3_metadata": (
            "is_autoep_zero3_partitioned_entry validate_autoep_zero3_partitioned_metadata"
        ),
        "deepspeed.utils.torch": "is_functorch_transforming required_torch_version",
        "deepspeed.utils.logging": "print_configuration print_json_dist set_log_level_from_string",
        "deepspeed.runtime.data_pipeline.data_routing.helper": "remove_random_ltd_state_dict",
        "deepspeed.compile.passes.contract": "validate_schedule",
        "deepspeed.git_version_info": "version",
    },
    "deepspeed.runtime.fp16.loss_scaler": {
        "deepspeed.runtime.config_utils": "DeepSpeedConfigObject",
        "deepspeed.runtime.utils": "has_inf_or_nan",
        "deepspeed.utils": "log_dist logger",
    },
    "deepspeed.runtime.lr_schedules": {
        "deepspeed.utils": "logger",
    },
    "deepspeed.runtime.pipe.dualpipev": {
        "deepspeed.runtime.pipe.engine": "PipelineEngine",
        "deepspeed.runtime.pipe.module": "PipelineModule",
    },
    "deepspeed.runtime.pipe.engine": {
        "deepspeed.utils.timer": (
            "BACKWARD_GLOBAL_TIMER BACKWARD_INNER_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER "
            "BACKWARD_MICRO_TIMER BACKWARD_REDUCE_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER "
            "FORWARD_GLOBAL_TIMER FORWARD_MICRO_TIMER STEP_GLOBAL_TIMER STEP_MICRO_TIMER ThroughputTimer"
        ),
        "deepspeed.runtime.bf16_optimizer": "BF16_Optimizer",
        "deepspeed.runtime.engine": "DeepSpeedEngine MEMORY_OPT_ALLREDUCE_SIZE",
        "deepspeed.runtime.utils": "PartitionedTensor",
        "deepspeed.runtime.pipe.module": "PipelineError PipelineModule",
        "deepspeed.runtime.dataloader": "RepeatingLoader",
        "deepspeed.runtime.zero.config": "ZeroStageEnum",
        "deepspeed.utils": "logger",
    },
    "deepspeed.runtime.pipe.module": {
        "deepspeed.runtime.pipe.topology": "PipeDataParallelTopology PipelineParallelGrid",
        "deepspeed.runtime.state_dict_factory": "SDLoaderFactory",
        "deepspeed.checkpoint.utils": "clone_tensors_for_torch_save",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.utils": "logger",
    },
    "deepspeed.runtime.rollout.hybrid_engine_rollout": {
        "deepspeed.runtime.rollout.continuous_batching": "ContinuousBatchRequest ContinuousBatchScheduler",
        "deepspeed.accelerator": "get_accelerator",
    },
    "deepspeed.runtime.rollout.opsd": {
        "deepspeed.runtime.rollout.base": "RolloutBatch",
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "deepspeed.utils.logging": "logger",
        "deepspeed.sequence.layer": "register_all_to_all_group",
    },
    "deepspeed.runtime.utils": {
        "deepspeed.runtime.constants": "PIPE_REPLICATED",
        "deepspeed.utils.bwc": (
            "bwc_pipeline_parallel_group bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_rank"
        ),
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.moe.utils": "is_moe_param",
        "deepspeed.utils": "logger",
        "deepspeed.module_inject.policy": "transpose",
    },
    "deepspeed.runtime.zero.config": {
        "deepspeed.runtime.config_utils": "DeepSpeedConfigModel get_scalar_param pp_int",
        "deepspeed.runtime.zero.leaf_module_config": "DeepSpeedZeroLeafModuleConfig",
        "deepspeed.runtime.zero.offload_config": (
            "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum"
        ),
        "deepspeed.runtime.zenflow.zenflow_config": "ZenFlowConfig",
        "deepspeed.utils": "logger",
    },
    "deepspeed.runtime.zero.offload_config": {
        "deepspeed.runtime.config_utils": "DeepSpeedConfigModel pp_int",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        "deepspeed.runtime.swap_tensor.partitioned_param_swapper": (
            "AsyncPartitionedParameterSwapper PartitionedParamStatus"
        ),
        "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig",
        "deepspeed.runtime.keep_in_fp32": "KEEP_IN_FP32_AUTO keep_buffers_in_fp32 keep_in_fp32_pattern",
        "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum",
        "deepspeed.inference.quantization.utils": (
            "WEIGHT_QUANTIZATION_LAYERS wrap_load_from_state_dict wrap_quantized_functional"
        ),
        "deepspeed.runtime.zero.utils": "assert_ints_same_as_other_ranks is_zero_param",
        "deepspeed.utils.debug": (
            "debug_module2name debug_param2name_id debug_param2name_id_shape "
            "debug_param2name_id_shape_device debug_param2name_id_shape_status"
        ),
        "deepspeed.runtime.torch_autocast": "get_comm_dtype has_comm_dtype sort_dtypes",
        "deepspeed.runtime.config_utils": "get_config_default",
        "deepspeed.runtime.utils": "get_only_unique_item see_memory_usage",
        "deepspeed.comm.comm": "init_distributed",
        "deepspeed.utils": "instrument_w_nvtx logger",
        "deepspeed.runtime.zero.linear": "zero3_linear_wrap",
    },
    "deepspeed.runtime.zero.stage3": {
        "deepspeed.runtime.zero.partition_parameters": (
            "AllGatherCoalescedHandle AllGatherHandle AllReduceCoalescedHandle CUDAQuantizer "
            "DEFAULT_TENSOR_OVERRIDES DS_Z3_EAGER_FALLBACK_OWNER_ATTR "
            "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR DeepSpeedTensorOverride GatheredParameters Init "
            "InsertPostInitMethodToModuleSubClasses MultipleAllGatherHandles NoGatherCoalescedHandle "
            "NoGatherHandle QuantizationInfo ZeroParamStatus ZeroParamType debug_rank0 empty_buffers "
            "free_param get_all_subclasses get_allgather_dtype get_new_tensor_fn_for_dtype "
            "partitioned_param_data_shape register_external_parameter restore_init_context reuse_buffers "
            "shutdown_init_context temp_contiguous_tensor top_level_context unregister_external_parameter "
            "zero_init_context zero_wrapper_for_fp_tensor_constructor"
        ),
        "deepspeed.runtime.fp16.loss_scaler": "CreateLossScaler",
        "deepspeed.ops.adam": "DeepSpeedCPUAdam",
        "deepspeed.runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
        "deepspeed.checkpoint.constants": (
            "EP_IS_EXPERT_PARAM EP_NUM_EXPERTS FP32_FLAT_GROUPS LOSS_SCALER OPTIMIZER_STATE_DICT PARAM "
            "PARTITION_COUNT ZERO_STAGE"
        ),
        "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
        "deepspeed.runtime.swap_tensor.optimizer_utils": "OptimizerSwapper",
        "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper": "PartitionedOptimizerSwapper",
        "deepspeed.runtime.swap_tensor.partitioned_param_swapper": "PartitionedParamStatus",
        "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper": "PipelinedOptimizerSwapper",
        "deepspeed.runtime.base_optimizer": "ZeROOptimizer",
        "deepspeed.runtime.zero.config": "ZeroStageEnum",
        "deepspeed.runtime.comm.coalesced_collectives": "all_to_all_quant_reduce reduce_scatter_coalesced",
        "deepspeed.module_inject.auto_ep_folding": "apply_folding_correction_to_grad_buffer",
        "deepspeed.runtime.utils": (
            "combine_grad_norm_groups count_used_parameters_in_backward has_inf_or_nan is_invalid_grad_norm "
            "is_model_parallel_parameter is_optimized_parameter mask_nan_or_inf_with_val_inplace"
        ),
        "deepspeed.runtime.zero.utils": "defragment get_mapping_to_flat_buffer get_norm_dtype",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.runtime.torch_autocast": (
            "get_all_comm_dtypes get_autocast_dtype is_autocast_initialized sort_dtypes"
        ),
        "deepspeed.utils": "logger z3_leaf_parameter",
        "deepspeed.runtime.zero.offload_states": (
            "offload_adam_states reload_adam_states unpin_offloaded_optimizer_states"
        ),
        "deepspeed.utils.pin_memory_tracker": "pinned_memory_summary",
        "deepspeed.utils.torch": "register_grad_hook required_torch_version",
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "deepspeed.checkpoint.constants": (
            "BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP CLIP_GRAD DS_VERSION GROUP_PADDINGS LOSS_SCALER "
            "PARAM_ALIGNMENT_PADDINGS PARAM_SLICE_MAPPINGS PARTITION_COUNT SINGLE_PARTITION_OF_FP32_GROUPS "
            "UNIVERSAL_CHECKPOINT_INFO ZERO_STAGE"
        ),
        "deepspeed.runtime.fp16.loss_scaler": "CreateLossScaler",
        "deepspeed.ops.adam": "DeepSpeedCPUAdam",
        "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
        "deepspeed.runtime.constants": "PIPE_REPLICATED",
        "deepspeed.runtime.base_optimizer": "ZeROOptimizer",
        "deepspeed.runtime.zero.config": "ZeroStageEnum",
        "deepspeed.runtime.utils": (
            "align_dense_tensors all_gather_dp_groups combine_grad_norm_groups "
            "count_used_parameters_in_backward empty_cache has_inf_or_nan is_invalid_grad_norm "
            "is_model_parallel_parameter is_optimized_parameter mask_nan_or_inf_with_val_inplace "
            "see_memory_usage"
        ),
        "deepspeed.module_inject.auto_ep_folding": "apply_folding_correction_to_grad_buffer",
        "deepspeed.utils.bwc": "bwc_tensor_model_parallel_rank",
        "deepspeed.utils.debug": "debug_param2name",
        "deepspeed.checkpoint": "enable_universal_checkpoint",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.runtime.torch_autocast": (
            "get_all_comm_dtypes get_autocast_dtype is_autocast_initialized sort_dtypes"
        ),
        "deepspeed.runtime.zero.utils": "get_norm_dtype",
        "deepspeed.moe.utils": "is_moe_param",
        "deepspeed.utils": "lazy_init_hp_params_optimizer_state link_hp_params logger",
        "deepspeed.runtime.zero.offload_states": (
            "offload_optimizer_states reload_optimizer_states unpin_offloaded_optimizer_states"
        ),
        "deepspeed.utils.torch": "register_grad_hook",
        "deepspeed.git_version_info": "version",
    },
    "deepspeed.sequence.cross_entropy": {
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.utils.logging": "logger",
    },
    "deepspeed.sequence.layer": {
        "deepspeed.module_inject.tp_shard": "AutoTPMeta get_shard_size_list",
        "deepspeed.accelerator": "get_accelerator",
    },
    "deepspeed.utils.groups": {
        "deepspeed.utils.exceptions": "DeprecatedException",
        "deepspeed.utils.bwc": "bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_world_size",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.utils": "log_dist",
    },
    "deepspeed.utils.logging": {
        "deepspeed.utils.torch": "required_torch_version",
    },
    "deepspeed.utils.timer": {
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.utils.logging": "print_dist",
    },
    "deepspeed.utils.z3_leaf_module": {
        "deepspeed.runtime.zero.leaf_module_config": "DeepSpeedZeroLeafModuleConfig",
        "deepspeed.utils.logging": "logger",
    },
    "deepspeed.utils.zero_to_fp32": {
        "deepspeed.checkpoint.constants": (
            "AUTOEP_LAYERS_KEY AUTOEP_LAYERS_KEY_LEGACY AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY "
            "AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT BUFFER_NAMES DS_VERSION FP32_FLAT_GROUPS "
            "FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES OPTIMIZER_STATE_DICT PARAM_ALIGNMENT_PADDINGS "
            "PARAM_SHAPES PARTITION_COUNT SINGLE_PARTITION_OF_FP32_GROUPS ZERO_STAGE"
        ),
        "deepspeed.utils": "logger",
    },
}

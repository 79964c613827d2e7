"""Names beside the engine: collectives, the accelerator, utilities, checkpoints' tools,
launcher, monitors.
"""

from __future__ import annotations

from .table import CHECKPOINTS, COMMUNICATION, LAUNCHING, MEASURING, Module, inside, mapped, refused, works

_PEEK = works(
    "dslaunch.runtime.zero.api",
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
    "safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad "
    "safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
    "safe_set_local_optimizer_state safe_update_full_grad_vectorized",
)
_LEAF = works(
    "dslaunch.runtime.zero.api",
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules set_z3_leaf_module "
    "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix z3_leaf_module",
)
_COLLECTIVES = (
    works("dslaunch.runtime.compat.init_distributed", "init_distributed"),
    works(
        "dslaunch.runtime.compat.comm",
        "is_available is_initialized new_group destroy_process_group get_world_group get_world_size get_rank "
        "get_local_rank get_global_rank get_all_ranks_from_group initialize_mesh_device barrier "
        "monitored_barrier broadcast broadcast_object_list gather scatter reduce all_reduce "
        "inference_all_reduce all_reduce_coalesced reduce_scatter reduce_scatter_tensor reduce_scatter_fn "
        "has_reduce_scatter_tensor all_gather all_gather_into_tensor allgather_fn has_all_gather_into_tensor "
        "has_all_reduce_coalesced all_gather_coalesced all_gather_object all_to_all_single all_to_all send "
        "recv isend irecv P2POp batch_isend_irecv",
    ),
    works(
        "dslaunch.runtime.comm.comms_log",
        "configure log_summary reset_log has_comm_data get_comm_operation_count get_logged_comm_ops",
    ),
    works("torch.distributed", "ReduceOp ProcessGroup"),
)
_COMM_INSIDE = refused(
    COMMUNICATION,
    "cdb nccl_backend mpi_backend ccl_backend hccl_backend timers timer_summary comms_logger timed_op "
    "init_deepspeed_backend TorchBackend set_backend has_coalescing_manager enable_symm_mem_for_group "
    "mpi_discovery in_aml in_aws_sm in_dlts patch_aml_env_for_torch_nccl_backend "
    "patch_aws_sm_env_for_torch_nccl_backend",
    "is a part of DeepSpeed's own collectives",
)
_ACCELERATOR = (
    works(
        "dslaunch.runtime.compat.accelerator.current",
        "get_accelerator set_accelerator is_current_accelerator_supported",
    ),
    mapped(
        "dslaunch.runtime.compat.accelerator.accelerator",
        "DeepSpeedAccelerator=Accelerator",
        "of CUDA and of the CPU",
    ),
)
_FILES = refused(
    CHECKPOINTS,
    "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank",
    "names the files of DeepSpeed's checkpoints",
)

_PROFILER = (
    works("dslaunch.runtime.metrics.profiler", "FlopsProfiler get_model_profile"),
    works(
        "dslaunch.runtime.metrics.amounts",
        "number_to_string flops_to_string macs_to_string duration_to_string bytes_to_string params_to_string",
    ),
    inside(
        "DEFAULT_PRECISION MODULE_HOOK_MAPPING Tensor get_module_duration get_module_flops get_module_macs "
        "module_flop_count module_mac_count old_functions wrapFunc"
    ),
)
_GROUPS = (
    works(
        "dslaunch.runtime.compat.groups",
        "_get_data_parallel_group=data_parallel_group "
        "_get_data_parallel_group_ranks=data_parallel_group_ranks "
        "_get_data_parallel_world_size=data_parallel_world_size _get_data_parallel_rank=data_parallel_rank "
        "_get_broadcast_src_rank=broadcast_src_rank _clone_world_group=data_parallel_group "
        "_get_sequence_data_parallel_group=sequence_data_parallel_group "
        "_get_sequence_data_parallel_world_size=sequence_data_parallel_world_size "
        "_get_sequence_data_parallel_rank=sequence_data_parallel_rank "
        "_get_model_parallel_world_size=model_parallel_world_size "
        "_get_sequence_parallel_world_size=sequence_parallel_world_size "
        "_get_sequence_parallel_rank=sequence_parallel_rank "
        "_get_sequence_parallel_group=sequence_parallel_group get_data_parallel_group=data_parallel_group "
        "get_data_parallel_world_size=data_parallel_world_size get_data_parallel_rank=data_parallel_rank "
        "get_model_parallel_world_size=model_parallel_world_size get_model_parallel_rank=model_parallel_rank "
        "get_tensor_model_parallel_world_size=model_parallel_world_size "
        "get_tensor_model_parallel_rank=model_parallel_rank "
        "get_tensor_model_parallel_group=model_parallel_group get_model_parallel_group=model_parallel_group "
        "get_tensor_model_parallel_src_rank=model_parallel_src_rank "
        "_get_expert_parallel_group=expert_parallel_group "
        "_get_expert_parallel_world_size=expert_parallel_world_size "
        "_get_expert_parallel_rank=expert_parallel_rank "
        "_get_expert_data_parallel_group=expert_data_parallel_group "
        "_get_expert_data_parallel_world_size=expert_data_parallel_world_size "
        "_get_expert_data_parallel_rank=expert_data_parallel_rank "
        "_get_max_expert_size=largest_expert_size _get_max_expert_size_name=largest_expert_size_name",
    ),
    inside(
        "mpu expert_tensor_parallel_world_size mesh_device initialize set_tensor_model_parallel_world_size "
        "set_tensor_model_parallel_rank"
    ),
)
_CHECKPOINT_CONSTANTS = (
    works(
        "dslaunch.drop_in.keys",
        "AFFINE_MAP AFFINE_MAP_PARAMS=PARAMS AFFINE_MAP_VERSION=VERSION AUTOEP_AFFINE_MAPS=AFFINE_MAPS "
        "AUTOEP_EP_SIZE=EP_SIZE AUTOEP_EXPERT_KEY_PREFIX=EXPERT_KEY_PREFIX "
        "AUTOEP_EXPERT_PLACEMENT=EXPERT_PLACEMENT AUTOEP_LAYERS_KEY=DS_AUTOEP_LAYERS "
        "AUTOEP_LAYERS_KEY_LEGACY=AUTOEP_LAYERS AUTOEP_NUM_EXPERTS=NUM_EXPERTS "
        "AUTOEP_NUM_LOCAL_EXPERTS=NUM_LOCAL_EXPERTS AUTOEP_PARAM_EP_RANK=EP_RANK "
        "AUTOEP_PARAM_LOCAL_EXPERTS=LOCAL_EXPERTS AUTOEP_PARAM_LOGICAL_SHAPE=LOGICAL_SHAPE "
        "AUTOEP_PLACEMENT_EP_SIZE=EP_SIZE AUTOEP_PLACEMENT_EXPERTS=EXPERTS "
        "AUTOEP_PLACEMENT_NUM_EXPERTS=NUM_EXPERTS AUTOEP_PLACEMENT_RANK=RANK AUTOEP_PLACEMENT_RANKS=RANKS "
        "AUTOEP_PLACEMENT_VERSION_KEY=VERSION AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY=CHECKPOINT_FORMAT "
        "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION_KEY=CHECKPOINT_FORMAT_VERSION "
        "AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP BUFFER_NAMES "
        "CAT_DIM CHECKPOINT_PARALLEL_DIMS=CHECKPOINT_PARALLEL_DIMENSIONS CHECKPOINT_PP_DEGREE=PP_DEGREE "
        "CHECKPOINT_TP_DEGREE=TP_DEGREE CLIP_GRAD DS_AUTOEP_UC_META "
        "DS_AUTOTP_UC_META=DS_AUTOTP_UNIVERSAL_CHECKPOINT_META DS_VERSION EP_IS_EXPERT_PARAM=IS_EXPERT_PARAM "
        "EP_NUM_EXPERTS EXPERT_PARAMETER_PATTERNS FOLDING_DISPATCH_STRATEGY=DISPATCH_STRATEGY "
        "FOLDING_EP_RANK=EP_RANK FOLDING_EP_SIZE=EP_SIZE FOLDING_ETP_RANK=ETP_RANK FOLDING_ETP_SIZE=ETP_SIZE "
        "FOLDING_FAMILY=FAMILY FOLDING_METADATA_KEY=FOLDING FOLDING_PARAM_FAMILIES=PARAM_FAMILIES "
        "FOLDING_SHARED_EXPERT_PLACEMENT=SHARED_EXPERT_PLACEMENT FOLDING_TP_RANK=TP_RANK "
        "FOLDING_TP_SIZE=TP_SIZE FOLDING_ZERO_PARTITION_COUNT=ZERO_PARTITION_COUNT "
        "FOLDING_ZERO_PARTITION_GROUP=ZERO_PARTITION_GROUP FOLDING_ZERO_PARTITION_RANK=ZERO_PARTITION_RANK "
        "FP32_FLAT_GROUPS FP32_GROUPS FP32_WEIGHT_KEY=FP32 FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES "
        "GROUP_PADDINGS LOSS_SCALER OPTIMIZER_STATE_DICT ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAM "
        "PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 "
        "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_SUB_PARAMS PARAM_ALIGNMENT_PADDINGS "
        "PARAM_GROUPS PARAM_N_SUB_PARAMS PARAM_SHAPES PARAM_SLICE_MAPPINGS PARTITION_COUNT "
        "PIPELINE_REPLICATED_PARAMETER_PATTERNS SINGLE_PARTITION_OF_FP32_GROUPS SUB_PARAMS_SHAPE "
        "SUB_PARAM_SHAPE SUB_PARAM_SHARD_WIDTHS TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO "
        "UNIVERSAL_CHECKPOINT_VERSION_KEY=UNIVERSAL_CHECKPOINT_VERSION VOCABULARY_PARAMETER_PATTERNS "
        "VOCAB_TENSOR ZERO_STAGE",
    ),
    works(
        "dslaunch.drop_in.constants", "MODEL_FILE_PREFIX MODEL_FILE_SUFFIX OPTIM_FILE_SUFFIX ZERO_FILE_PREFIX"
    ),
    inside(
        "AUTOEP_PLACEMENT_VERSION AUTOEP_ZERO12_REQUIRED_FIELDS AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION "
        "AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT BF16_ZERO_FILE_PREFIX FOLDING_METADATA_VERSION "
        "FP16_ZERO_FILE_PREFIX LAYER_FILE_PREFIX "
        "UNIVERSAL_CHECKPOINT_VERSION_VALUE "
    ),
)

BESIDE: tuple[Module, ...] = (
    Module(
        "deepspeed.comm",
        (
            *_COLLECTIVES,
            _COMM_INSIDE,
            refused(
                COMMUNICATION,
                "get_debug_log_name get_default_args get_local_rank_from_launcher get_msg_size_from_args "
                "get_tensor_kwarg get_tensor_position get_world_rank_from_launcher "
                "get_world_size_from_launcher",
                "is a part of DeepSpeed's own collectives",
            ),
        ),
    ),
    Module("deepspeed.comm.comm", (*_COLLECTIVES, _COMM_INSIDE)),
    Module("deepspeed.comm.reduce_op", (works("torch.distributed", "ReduceOp"),)),
    Module("deepspeed.accelerator", _ACCELERATOR),
    Module(
        "deepspeed.accelerator.real_accelerator",
        (*_ACCELERATOR[:1], inside("SUPPORTED_ACCELERATOR_LIST accel_logger ds_accelerator dsa1 dsa2")),
    ),
    Module(
        "deepspeed.utils",
        (
            _PEEK,
            _LEAF,
            *_GROUPS,
            works("dslaunch.runtime.data.loader", "RepeatingLoader"),
            works("dslaunch.runtime.log", "logger log_dist log_dist_once set_log_level_from_string"),
            works("dslaunch.runtime.compat.on_device", "OnDevice"),
            works("dslaunch.runtime.compat.accelerator.ranges", "instrument_w_nvtx"),
            works("dslaunch.drop_in.pickled", "fragment_address"),
            inside(
                "get_caller_func get_full_hp_grad get_full_hp_param get_hp_fragment_mapping get_numactl_cmd "
                "z3_leaf_parameter lazy_init_hp_params_optimizer_state link_hp_params map_to_flat_opt_states "
                "recursive_getattr recursive_setattr set_full_hp_grad set_full_hp_param tensor_fragment"
            ),
        ),
    ),
    Module(
        "deepspeed.utils.logging",
        (
            works(
                "dslaunch.runtime.log",
                "logger log_dist log_dist_once print_dist print_json_dist print_configuration "
                "warning_once get_dist_msg get_log_level_from_string set_log_level_from_string "
                "get_current_level should_log_le",
            ),
            inside("LoggerFactory log_levels"),
        ),
    ),
    Module(
        "deepspeed.utils.groups",
        _GROUPS,
    ),
    Module("deepspeed.utils.init_on_device", (works("dslaunch.runtime.compat.on_device", "OnDevice"),)),
    Module(
        "deepspeed.utils.tensor_fragment",
        (
            _PEEK,
            works("dslaunch.drop_in.pickled", "fragment_address"),
            inside(
                "tensor_fragment map_to_flat_opt_states get_full_hp_param set_full_hp_param get_full_hp_grad "
                "set_full_hp_grad get_hp_fragment_mapping"
            ),
        ),
    ),
    Module(
        "deepspeed.utils.z3_leaf_module", (_LEAF, inside("z3_leaf_parameter apply_zero_leaf_module_config"))
    ),
    Module(
        "deepspeed.utils.zero_to_fp32",
        (
            works(
                "dslaunch.utils.zero_to_fp32",
                "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict "
                "convert_zero_checkpoint_to_state_dict load_state_dict_from_zero_checkpoint",
            ),
            works(
                "dslaunch.runtime.compat.state_files",
                "get_model_state_file get_model_state_files get_optim_files",
            ),
            inside(
                "GatheredTensor OUTPUT_DTYPE_NAMES args atoi debug device get_checkpoint_files "
                "natural_keys parse_model_states parse_optim_states parser to_torch_tensor "
                "zero3_partitioned_param_info zero_model_state"
            ),
        ),
    ),
    Module(
        "deepspeed.utils.zero_to_torch",
        (works("dslaunch.utils.zero_to_torch", "main"), inside("zero_to_fp32")),
    ),
    Module(
        "deepspeed.utils.torch",
        (
            works("dslaunch.drop_in.torch_version", "required_torch_version"),
            inside("is_functorch_transforming jit_script_compat register_grad_hook"),
        ),
    ),
    Module(
        "deepspeed.checkpoint",
        (
            _FILES,
            *_CHECKPOINT_CONSTANTS,
            refused(
                CHECKPOINTS,
                "DeepSpeedCheckpoint ZeROCheckpoint enable_universal_checkpoint get_model_3d_descriptor "
                "merge_state model_3d_desc reshape_meg_2d_parallel",
                "changes a checkpoint from one number of ranks to another, which no checkpoint needs here",
            ),
            works("dslaunch.drop_in.pickled", "SubparamShape"),
        ),
    ),
    Module(
        "deepspeed.checkpoint.utils",
        (
            works("dslaunch.runtime.compat.nested", "clone_tensors_for_torch_save"),
            works(
                "dslaunch.drop_in.constants",
                "MODEL_FILE_PREFIX MODEL_FILE_SUFFIX OPTIM_FILE_SUFFIX ZERO_FILE_PREFIX",
            ),
            _FILES,
        ),
    ),
    Module("deepspeed.monitor"),
    Module(
        "deepspeed.monitor.monitor", (works("dslaunch.runtime.metrics.monitor", "Monitor MonitorMaster"),)
    ),
    Module(
        "deepspeed.monitor.csv_monitor", (works("dslaunch.runtime.metrics.monitor", "csvMonitor=CsvMonitor"),)
    ),
    Module(
        "deepspeed.monitor.tensorboard", (works("dslaunch.runtime.metrics.monitor", "TensorBoardMonitor"),)
    ),
    Module("deepspeed.monitor.wandb", (works("dslaunch.runtime.metrics.monitor", "WandbMonitor"),)),
    Module(
        "deepspeed.monitor.config",
        (
            works(
                "dslaunch.runtime.config.monitor",
                "CSVConfig=CsvConfig TensorBoardConfig WandbConfig DeepSpeedMonitorConfig=MonitorConfig",
            ),
            works("dslaunch.runtime.metrics.monitor", "get_monitor_config"),
            refused(
                MEASURING,
                "CometConfig",
                "writes to Comet, which needs an account; tensorboard, csv_monitor and wandb are here",
            ),
        ),
    ),
    Module("deepspeed.profiling"),
    Module("deepspeed.profiling.flops_profiler", _PROFILER),
    Module("deepspeed.profiling.flops_profiler.profiler", _PROFILER),
    Module(
        "deepspeed.utils.timer",
        (
            works("dslaunch.runtime.metrics.throughput", "ThroughputTimer"),
            inside(
                "BACKWARD_GLOBAL_TIMER BACKWARD_INNER_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER "
                "BACKWARD_MICRO_TIMER BACKWARD_REDUCE_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER "
                "CudaEventTimer FORWARD_GLOBAL_TIMER FORWARD_MICRO_TIMER NoopTimer PSUTILS_INSTALLED "
                "STEP_GLOBAL_TIMER STEP_MICRO_TIMER SynchronizedWallClockTimer TIME_EPSILON trim_mean"
            ),
        ),
    ),
    Module("deepspeed.checkpoint.constants", _CHECKPOINT_CONSTANTS),
    Module("deepspeed.launcher"),
    Module(
        "deepspeed.launcher.runner",
        (
            works(
                "dslaunch.drop_in.constants",
                "DEEPSPEED_ENVIRONMENT_NAME DEEPSPEED_ENVIRONMENT_PATHS DLTS_HOSTFILE",
            ),
            mapped(
                "dslaunch.drop_in.runner",
                "main",
                "dslaunch's command line, which has DeepSpeed's options; a mistake in them ends the program "
                "with a message and exit code 2",
            ),
            refused(
                LAUNCHING,
                "EXCLUDE_ENVS EXPORT_ENVS LAUNCHER_CLASSES PDSH_MAX_FAN_OUT apply_num_nodes_and_gpus "
                "encode_world_info fetch_hostfile parse_args parse_inclusion_exclusion parse_node_config "
                "parse_node_config_list parse_resource_filter run_autotuning",
                "is a part of DeepSpeed's launcher; `dslaunch --dry_run` shows what would run where",
            ),
        ),
    ),
    Module(
        "deepspeed.launcher.launch",
        (
            mapped(
                "dslaunch.drop_in.launch", "main", "dslaunch without SSH, for the node that --node_rank names"
            ),
            refused(
                LAUNCHING,
                "PID_FILE_BASEPATH parse_args terminate_process_tree",
                "is a part of DeepSpeed's launcher",
            ),
        ),
    ),
)

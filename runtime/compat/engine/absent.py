"""Names of DeepSpeed's engine that ours lacks, and what to do instead.

Source: DeepSpeed 0.19.8 runtime/engine.py, `DeepSpeedEngine`: all its public methods and attributes
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import ConfigError

_BY_REASON: tuple[tuple[str, str], ...] = (
    ("call save_16bit_model()", "save_fp16_model"),
    ("set gradient_clipping in the ds_config; step() clips", "clip_fp32_gradients"),
    (
        "step() averages by itself; allreduce_gradients() does so at once",
        "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain "
        "buffered_allreduce_fallback gradient_predivide_factor postscale_gradients",
    ),
    (
        "gradients are dense; leave Embedding(sparse=True) to torch, which the engine averages as dense ones",
        "sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain",
    ),
    (
        (
            "rank 0 prints times with wall_clock_breakdown, and get_wall_clock_timers() returns them; time "
            "more with torch.profiler"
        ),
        "engine_timers engine_timers_cache print_forward_breakdown timers update_interval",
    ),
    ("flops_profiler prints them, once", "flops fwd_duration"),
    ("no use of memory is printed; call torch.cuda.memory_summary()", "memory_breakdown"),
    ("a monitor gets them, see docs/train/monitors.md", "losses summary_events"),
    ("call gc.collect()", "collect_python_gc"),
    (
        "the ranks that train on other data are those of the axis dp of the mesh: see "
        "deepspeed.utils.groups and get_data_parallel_world_size()",
        "data_parallel_group dist_backend mesh_device seq_data_parallel_group use_ds_comm",
    ),
    (
        "sequences are divided as sequence_parallel_size says, and layers as tensor_parallel",
        "compile_autosp compile_autotp get_autosp_backend get_autotp_backend pipeline_parallelism "
        "seq_parallel_group tensor_parallel_config uses_parallelization_pass_only",
    ),
    (
        "the layers say it, and deepspeed.utils.groups: layer.num_experts, layer.exp_counts",
        "all_to_all_group expert_data_parallel_group expert_parallel_group gate_modules has_moe_layers "
        "load_moe_state_dict local_all_to_all_group moe_layers num_experts",
    ),
    (
        "there is no DeepCompile; engine.compile() is torch.compile",
        "compile_zero_optimization_stage get_compile_time get_deepcompile_backend "
        "get_deepspeed_compile_backend is_deepcompile_active is_deepcompile_enabled register_compile_pass",
    ),
    (
        "checkpoints have a format of their own; see save_checkpoint() and load_checkpoint()",
        "checkpoint_engine checkpoint_mp_rank checkpoint_serialization_enabled "
        "checkpoint_tag_validation_enabled checkpoint_tag_validation_fail checkpoint_writer_enabled "
        "load_universal_checkpoint loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size "
        "param_names save_non_zero_checkpoint save_zero_checkpoint",
    ),
    (
        "the ds_config's section is not available here",
        "autotuning_enabled autotuning_end_profile_step autotuning_metric autotuning_metric_path "
        "autotuning_model_info autotuning_model_info_path autotuning_profile_model_info "
        "autotuning_start_profile_step curriculum_learning_config curriculum_learning_enabled "
        "data_efficiency_config data_efficiency_enabled data_sampling_config data_sampling_enabled "
        "optimized_linear_base_weight_sharding optimized_linear_lora_enabled random_ltd_config "
        "random_ltd_enabled random_ltd_initialize random_ltd_scheduler "
        "set_custom_curriculum_learning_schedule set_data_post_process_func zenflow_config",
    ),
    (
        "the ds_config says what lies in host memory or on NVMe; offload_states() moves states between steps",
        "aio_config cpuadam_cores_perc super_offload swap_tensor_config zero_cpu_offload "
        "zero_nvme_offload_optimizer zero_offload_optimizer zero_offload_param zero_partial_offload "
        "zero_use_cpu_optimizer",
    ),
    (
        "the ds_config's key has no effect here, or one fixed value; docs/train/config.md says which",
        "bf16_master_weights_and_gradients bf16_optimizer_states communication_data_type "
        "fp16_master_weights_and_gradients is_sanity_checks_enabled "
        "optimizer_legacy_fusion torch_autocast_lower_precision_safe_modules "
        "zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential "
        "zero_allow_untested_optimizer zero_compute_grad_norm zero_contiguous_gradients "
        "zero_elastic_checkpoint zero_force_ds_cpu_optimizer zero_hpz_partition_size "
        "zero_ignore_unused_parameters zero_legacy_stage1 zero_load_from_fp32_weights "
        "zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance "
        "zero_module_granularity_threshold zero_multi_rank_bucket_allreduce zero_overlap_comm "
        "zero_parameter_alignment zero_quantized_gradients zero_quantized_nontrainable_weights "
        "zero_quantized_weights zero_reduce_scatter zero_round_robin_gradients "
        "zero_save_muon_momentum_buffer_in_memory zero_sub_group_size",
    ),
    (
        "read engine.settings.fp16 and engine.settings.bf16",
        "dynamic_loss_scale_args get_data_types torch_autocast_z0_gradscaler",
    ),
    ("read engine.optimizer and engine.lr_scheduler", "basic_optimizer client_lr_scheduler client_optimizer"),
    (
        "is how DeepSpeed works inside",
        "dont_change_device first_dataloader_check flatten get_optimizer_configuration "
        "inside_no_sync_ctxt is_first_weights_partition_group is_iterable_style_dataset "
        "is_map_style_dataset module_forward_post_hook module_forward_pre_hook scale_wrt_gas "
        "training_data unflatten warn_unscaled_loss",
    ),
)


class Fixed:
    """An attribute of DeepSpeed's engine that programs set, and that has one value here.

    In `instead` is what to do for another one.
    """

    def __init__(self, value: object, instead: str) -> None:
        """`value` may be a function of the engine."""
        self._value, self._instead, self._name = value, instead, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: object, owner: type) -> object:
        if not callable(self._value):
            return self._value
        return self if engine is None else self._value(engine)

    def __set__(self, engine: object, value: object) -> None:
        """Errors: ConfigError for another value"""
        here = self.__get__(engine, type(engine))
        if value != here:
            raise ConfigError(f"engine.{self._name} = {value!r}: is always {here!r} here; {self._instead}")


def names_by_reason() -> Iterable[tuple[str, tuple[str, ...]]]:
    """Return the absent names, in groups."""
    return ((reason, tuple(names.split())) for reason, names in _BY_REASON)


def why_absent(name: str) -> str | None:
    """Why DeepSpeed's `engine.<name>` is not here, and what to do; None if DeepSpeed has
    none of that name.
    """
    return next((reason for reason, names in names_by_reason() if name in names), None)

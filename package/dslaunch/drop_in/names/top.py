"""The package itself."""

from __future__ import annotations

from ...runtime.optimizers.registry import DEEPSPEEDS
from .inference import CONFIG_FOR_INFERENCE, ENGINE_FOR_INFERENCE
from .table import (
    INFERENCE,
    INSIDE,
    KERNELS,
    OPTIMIZERS,
    Module,
    inside,
    mapped,
    refused,
    works,
)

_INSIDE_OF_OPS = {module: (inside("multi_tensor_applier"),) for module in ("fused_adam", "fused_lion")}

TOP: tuple[Module, ...] = (
    Module(
        "deepspeed",
        (
            mapped(
                "dslaunch.drop_in.calls",
                "initialize",
                "reads a ds_config leniently: what it does not know it names in a warning; an "
                "mpu has the ranks of the ds_config's axes",
            ),
            works("dslaunch.drop_in.calls", "add_config_arguments"),
            works("dslaunch.runtime.compat.init_distributed", "init_distributed"),
            mapped(
                "dslaunch.runtime.compat.engine.getters",
                "DeepSpeedEngine",
                "what both kinds of engine are, for every configuration",
            ),
            mapped(
                "dslaunch.runtime.compat.engine.optimizer",
                "DeepSpeedOptimizer",
                "one optimizer over flat shards, a torch.optim.Optimizer, at every ZeRO stage",
            ),
            works("dslaunch.runtime.data.loader", "DeepSpeedDataLoader=Loader"),
            works("dslaunch.runtime.errors", "DeepSpeedConfigError=ConfigError"),
            works("dslaunch.runtime.activation.checkpointing", "checkpointing=*"),
            works("dslaunch.runtime.compat.accelerator.current", "get_accelerator"),
            works("dslaunch.runtime.log", "logger log_dist"),
            works("dslaunch.runtime.compat.on_device", "OnDevice"),
            works(
                "dslaunch.drop_in.identity",
                "__version__ __version_major__ __version_minor__ __version_patch__ __git_hash__ "
                "__git_branch__ version git_hash git_branch",
            ),
            works("dslaunch.drop_in.constants", "TORCH_DISTRIBUTED_DEFAULT_PORT HAS_TRITON"),
            works("typing", "DeepSpeedOptimizerCallable=Callable DeepSpeedSchedulerCallable=Callable"),
            *ENGINE_FOR_INFERENCE,
            works("dslaunch.runtime.compat.inference.init_inference", "default_inference_config"),
            CONFIG_FOR_INFERENCE,
            refused(
                INFERENCE,
                "DeepSpeedHybridEngine",
                "is an engine of its own for generating; every engine here generates",
            ),
            works("dslaunch.runtime.tensor.model_init", "tp_model_init set_autotp_mode"),
            inside("load_ds_config merge_tp_model_init_into_config record_tp_model_init_args"),
            works("dslaunch.runtime.compat.pipeline.module", "PipelineModule DualPipeVModule"),
            mapped(
                "dslaunch.runtime.compat.engine.engines",
                "PipelineEngine DualPipeVEngine=PipelineEngine",
                "one engine for every schedule",
            ),
            refused(
                KERNELS,
                "DeepSpeedTransformerLayer DeepSpeedTransformerConfig "
                "replace_transformer_layer module_inject",
                "is one of DeepSpeed's kernels for layers",
            ),
            refused(
                INSIDE,
                "DeepSpeedConfig",
                "is how DeepSpeed reads a ds_config; engine.config is the dict, "
                "engine.settings what it means",
            ),
            refused(
                OPTIMIZERS,
                "set_optimizer_flags resolve_per_head_muon_after_sharding MUON_OPTIMIZER",
                "prepares a model for DeepSpeed's Muon; Muon here finds the matrices by itself",
            ),
            works("dslaunch.runtime.compat.comm", "dist=*"),
            inside("QUERY KV MLA_Q MLA_KV NOT_HEAD_BLOCKED"),
        ),
    ),
    Module(
        "deepspeed.constants",
        (
            works(
                "dslaunch.drop_in.constants",
                "TORCH_DISTRIBUTED_DEFAULT_PORT CROSS_RANK CROSS_SIZE LOCAL_RANK",
            ),
            works("dslaunch.drop_in.constants", "default_pg_timeout"),
            refused(INFERENCE, "INFERENCE_GENERIC_MODE INFERENCE_SPECIALIZED_MODE", "is for FastGen"),
        ),
    ),
    Module(
        "deepspeed.git_version_info",
        (
            works("dslaunch.drop_in.identity", "version git_hash git_branch"),
            works("dslaunch.drop_in.build", "accelerator_name installed_ops torch_info"),
        ),
    ),
    Module(
        "deepspeed.ops",
        (
            works("dslaunch.drop_in.op_builders", "__compatible_ops__=compatible_ops"),
            refused(
                KERNELS,
                "DeepSpeedTransformerLayer DeepSpeedTransformerConfig",
                "is one of DeepSpeed's kernels for layers",
            ),
        ),
    ),
    Module(
        "deepspeed.ops.adam",
        (
            works("dslaunch.ops.adam", "DeepSpeedCPUAdam FusedAdam"),
            refused(
                OPTIMIZERS,
                "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
                "updates some gradients late and others at once; "
                "offload_optimizer.delayed_update is what there is",
            ),
        ),
    ),
    *(
        Module(
            f"deepspeed.ops.{row.module}.{module}",
            (works(f"dslaunch.ops.{row.module}", kind), *_INSIDE_OF_OPS.get(module, ())),
        )
        for row in DEEPSPEEDS
        for module, kind in row.deepspeed_modules.items()
    ),
    *(
        Module(f"deepspeed.ops.{row.module}", (works(f"dslaunch.ops.{row.module}", " ".join(row.classes)),))
        for row in DEEPSPEEDS
        if row.module != "adam"  # above
    ),
)

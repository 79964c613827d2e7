"""Whole modules of DeepSpeed's that are not here; what is below one of them is not here either."""

from __future__ import annotations

from .table import (
    CHECKPOINTS,
    COMMUNICATION,
    COMPRESSION,
    EXPERTS,
    INFERENCE,
    INSIDE,
    KERNELS,
    LAUNCHING,
    MEASURING,
    OPTIMIZERS,
    PIPELINES,
    TENSOR_PARALLEL,
    TUNING,
    Module,
    absent,
)

_BY_REASON: tuple[tuple[str, str, str], ...] = (
    (TUNING, "searches for batch sizes and stages", "autotuning"),
    (TUNING, "chooses and orders training data", "runtime.data_pipeline"),
    (COMPRESSION, "quantizes models", "runtime.weight_quantizer"),
    (COMPRESSION, "has layers with quantized or sharded bases", "linear"),
    (
        INFERENCE,
        "is a part of how DeepSpeed's engines for inference work inside; init_inference() is here",
        "model_implementations runtime.hybrid_engine runtime.hybrid_engine_graph",
    ),
    (INFERENCE, "is FastGen, a server's engine; vLLM and SGLang serve", "inference.v2"),
    (
        INFERENCE,
        "quantizes weights, which nothing here does; init_inference(dtype=torch.bfloat16) halves them",
        "inference.quantization",
    ),
    (
        INFERENCE,
        "gives a batch new prompts where others have ended; give fewer prompts at once",
        "runtime.rollout.continuous_batching",
    ),
    (INFERENCE, "loads Megatron's state_dicts", "runtime.state_dict_factory"),
    (
        TENSOR_PARALLEL,
        "divides layers between ranks in its own way",
        "module_inject runtime.tensor_parallel runtime.domino",
    ),
    (
        TENSOR_PARALLEL,
        "computes the loss in chunks; TiledFusedLogitsLoss does",
        "runtime.chunked_cross_entropy",
    ),
    (EXPERTS, "is a part of how DeepSpeed sends tokens to experts", "moe"),
    (PIPELINES, "is how DeepSpeed runs a batch", "runtime.pipe.schedule runtime.pipe.p2p"),
    (
        KERNELS,
        "has kernels for layers",
        "ops.transformer ops.triton_ops ops.deepspeed4science ops.random_ltd",
    ),
    (
        KERNELS,
        "compiles kernels when they are first used; ours are compiled with the package",
        "ops.csrc ops.compile",
    ),
    (KERNELS, "quantizes numbers", "ops.fp_quantizer ops.quantizer"),
    (
        KERNELS,
        "reads and writes files; the ds_config's section aio and `nvme_path` do",
        "ops.aio ops.gds io nvme ops.pin_memory",
    ),
    (OPTIMIZERS, "is DeepSpeed's Muon; the type Muon of the ds_config is here", "runtime.zero.muon"),
    (
        OPTIMIZERS,
        "updates some gradients late; offload_optimizer.delayed_update and super_offload are here",
        "runtime.zenflow runtime.superoffload ops.adam.zenflow_cpu_adam ops.adam.zenflow_torch_adam",
    ),
    (
        CHECKPOINTS,
        "writes checkpoints in the background; checkpoint.async_save does",
        "datastates runtime.checkpoint_engine runtime.model_checkpointing",
    ),
    (
        CHECKPOINTS,
        "changes a checkpoint from one number of ranks to another, which no checkpoint needs here",
        "checkpoint.affine checkpoint.affine_transfer checkpoint.autoep_affine checkpoint.autoep_universal "
        "checkpoint.autoep_zero3_metadata checkpoint.deepspeed_checkpoint checkpoint.ds_to_universal "
        "checkpoint.reshape_3d_utils checkpoint.reshape_meg_2d checkpoint.reshape_utils "
        "checkpoint.universal_checkpoint checkpoint.zero_checkpoint",
    ),
    (
        COMMUNICATION,
        "is a back end of DeepSpeed's collectives",
        (
            "comm.backend comm.ccl comm.mori comm.pg_utils comm.torch comm.utils comm.config "
            "comm.constants runtime.comm"
        ),
    ),
    (
        LAUNCHING,
        "is a part of DeepSpeed's launcher",
        "launcher.constants launcher.launcher_helper launcher.multinode_runner utils.numa",
    ),
    (
        MEASURING,
        "writes to Comet, which needs an account; tensorboard, csv_monitor and wandb are here",
        "monitor.comet",
    ),
    (
        MEASURING,
        "is a part of what DeepSpeed measures with",
        "profiling.config profiling.constants utils.comms_logging monitor.utils",
    ),
    (
        KERNELS,
        "is one accelerator's part; get_accelerator() gives CUDA or the CPU",
        "accelerator.abstract_accelerator accelerator.cpu_accelerator accelerator.cuda_accelerator "
        "accelerator.hpu_accelerator accelerator.klxpu_accelerator accelerator.mlu_accelerator "
        "accelerator.mps_accelerator accelerator.npu_accelerator accelerator.sdaa_accelerator "
        "accelerator.supa_accelerator accelerator.xpu_accelerator",
    ),
    (INSIDE, "is DeepCompile; engine.compile() is torch.compile", "compile runtime.compiler"),
    (
        INSIDE,
        "is an optimizer of DeepSpeed's for one configuration; ours is FlatOptimizer",
        "runtime.bf16_optimizer runtime.fp16.fused_optimizer runtime.fp16.unfused_optimizer",
    ),
    (
        INSIDE,
        "is a part of how DeepSpeed works inside",
        "compat git_version_info_installed runtime.config_utils runtime.keep_in_fp32 "
        "runtime.precision_config runtime.python_gc runtime.sparse_tensor runtime.torch_autocast "
        "runtime.activation_checkpointing.config "
        "runtime.zero.contiguous_memory_allocator runtime.zero.leaf_module_config runtime.zero.linear "
        "runtime.zero.offload_states runtime.zero.parameter_offload "
        "runtime.zero.partitioned_param_coordinator runtime.zero.partitioned_param_profiler "
        "runtime.zero.test runtime.zero.utils utils.bwc utils.config utils.debug utils.exceptions "
        "utils.mixed_precision_linkage utils.pin_memory utils.pin_memory_tracker utils.static_cache "
        "utils.types ops.adam.multi_tensor_apply ops.lion.multi_tensor_apply",
    ),
)

ABSENT: tuple[Module, ...] = tuple(
    absent(f"deepspeed.{name}", topic, why) for topic, why, names in _BY_REASON for name in names.split()
)

"""Modules of which only what programs ask, or sort with, is here. The other names in them are not."""

from __future__ import annotations

from .table import COMPRESSION, EXPERTS, INSIDE, KERNELS, LAUNCHING, MEASURING, Module, absent, mapped, works

_BY_NAME = works("dslaunch.drop_in.attributes", "recursive_getattr recursive_setattr")
_BUILDERS = mapped(
    "dslaunch.drop_in.op_builders",
    "OpBuilder CPUAdamBuilder CPUAdagradBuilder CPULionBuilder FusedAdamBuilder FusedLambBuilder "
    "FusedLionBuilder AsyncIOBuilder CCLCommBuilder DeepCompileBuilder EvoformerAttnBuilder "
    "FPQuantizerBuilder GDSBuilder InferenceBuilder InferenceCoreBuilder InferenceCutlassBuilder "
    "NotImplementedBuilder PinMemoryBuilder QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder "
    "RandomLTDBuilder ShareMemCommBuilder SpatialInferenceBuilder StochasticTransformerBuilder "
    "TransformerBuilder UtilsBuilder",
    "`NAME` and `is_compatible()` say what there is; `load()` raises",
)
_EXPERTS = "is a part of how DeepSpeed sends tokens to experts"
_COMPILES = "compiles kernels when they are first used; ours are compiled with the package"

ASKED: tuple[Module, ...] = (
    absent("deepspeed.compression", COMPRESSION, "prunes or quantizes models", _BY_NAME),
    absent("deepspeed.compression.helper", COMPRESSION, "prunes or quantizes models", _BY_NAME),
    Module("deepspeed.utils.module_utils", (_BY_NAME,)),
    absent(
        "deepspeed.moe.utils",
        EXPERTS,
        _EXPERTS,
        works("dslaunch.runtime.experts.layer", "MoE"),
        works(
            "dslaunch.runtime.experts.param_groups",
            "has_moe_layers is_moe_param is_moe_param_group split_params_into_shared_and_expert_params "
            "split_params_grads_into_shared_and_expert_params "
            "split_params_into_different_moe_groups_for_optimizer configure_moe_param_groups",
        ),
    ),
    absent("deepspeed.moe.layer", EXPERTS, _EXPERTS, works("dslaunch.runtime.experts.layer", "MoE Experts")),
    absent("deepspeed.moe.experts", EXPERTS, _EXPERTS, works("dslaunch.runtime.experts.layer", "Experts")),
    absent(
        "deepspeed.moe.sharded_moe",
        EXPERTS,
        _EXPERTS,
        works("dslaunch.runtime.experts.layer", "MOELayer"),
        mapped(
            "dslaunch.runtime.experts.gate",
            "TopKGate",
            "returns our `Routes` in every case; the layer goes by it",
        ),
    ),
    absent("deepspeed.ops.op_builder", KERNELS, _COMPILES, _BUILDERS),
    absent(
        "deepspeed.ops.op_builder.all_ops",
        KERNELS,
        _COMPILES,
        works("dslaunch.drop_in.op_builders", "ALL_OPS"),
        works("dslaunch.drop_in.build", "accelerator_name"),
    ),
    absent("deepspeed.ops.op_builder.builder", KERNELS, _COMPILES, _BUILDERS),
    absent("deepspeed.ops.op_builder.cpu", KERNELS, _COMPILES, _BUILDERS),
    absent(
        "deepspeed.runtime.swap_tensor",
        INSIDE,
        "is a part of how DeepSpeed works inside",
        mapped(
            "dslaunch.drop_in.constants",
            "MIN_SWAPPABLE_BYTES",
            "DeepSpeed's number; what goes to a disk here may be smaller",
        ),
    ),
    absent(
        "deepspeed.utils.nvtx",
        MEASURING,
        "names ranges for a profiler",
        works("dslaunch.runtime.compat.accelerator.ranges", "instrument_w_nvtx"),
    ),
    absent(
        "deepspeed.env_report",
        LAUNCHING,
        "is a part of DeepSpeed's report; `dslaunch report-env` is ours",
        mapped("dslaunch.drop_in.report", "main cli_main", "dslaunch's report on this machine"),
        works("dslaunch.drop_in.build", "installed_ops torch_info accelerator_name"),
        works("dslaunch.drop_in.op_builders", "ALL_OPS"),
        works("dslaunch.runtime.compat.accelerator.current", "get_accelerator"),
    ),
)

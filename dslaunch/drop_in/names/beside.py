"""What stands beside the engine: utilities, collectives, launcher, monitors."""

from __future__ import annotations

from .table import Module, mapped, works

BESIDE: tuple[Module, ...] = (
    Module(
        "deepspeed.utils",
        (
            works(
                "dslaunch.runtime.zero.api",
                "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
                "safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
                "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized",
            ),
            works(
                "dslaunch.runtime.zero.api", "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules"
            ),
            works("dslaunch.runtime.data", "RepeatingLoader"),
            works("dslaunch.runtime.initialize", "logger=_log"),
        ),
    ),
    Module("deepspeed.utils.logging", (works("dslaunch.runtime.initialize", "logger=_log"),)),
    Module(
        "deepspeed.utils.zero_to_fp32",
        (
            works(
                "dslaunch.utils.zero_to_fp32",
                "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict "
                "load_state_dict_from_zero_checkpoint",
            ),
        ),
    ),
    Module(
        "deepspeed.comm",
        (
            works("torch.distributed", "is_initialized get_rank get_world_size"),
            works("dslaunch.runtime.initialize", "init_distributed"),
        ),
    ),
    Module("deepspeed.launcher"),
    Module(
        "deepspeed.launcher.runner",
        (
            works(
                "dslaunch.drop_in.constants",
                "DEEPSPEED_ENVIRONMENT_NAME DEEPSPEED_ENVIRONMENT_PATHS DLTS_HOSTFILE",
            ),
            mapped("dslaunch.launcher.cli", "main", "dslaunch's command line, which has DeepSpeed's options"),
        ),
    ),
    Module(
        "deepspeed.launcher.launch",
        (
            mapped(
                "dslaunch.drop_in.launch", "main", "dslaunch without SSH, for the node that --node_rank names"
            ),
        ),
    ),
)

"""Tools beside training, by the names that DeepSpeed has in its `utils`, `runtime.utils` and
`checkpoint.utils`, `zero_to_fp32`, `zero_to_torch`.

All are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import zero_to_fp32 as zero_to_fp32, zero_to_torch as zero_to_torch

_HOMES = {
    "compat.accelerator.ranges": "instrument_w_nvtx",
    "data.loader": "RepeatingLoader",
    "compat.estimate": "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
    "estimate_zero2_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs "
    "estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live",
    "compat.grad_norm": (
        "clip_grad_norm_ clip_tensors_by_global_norm get_global_norm "
        "get_global_norm_of_tensors has_inf_or_nan"
    ),
    "log": "call_to_str log_dist log_dist_once logger print_dist print_json_dist set_log_level_from_string",
    "compat.memory_report": "empty_cache see_memory_usage",
    "compat.nested": "clone_tensors_for_torch_save copy_to_device get_tensor_bytes move_to_device",
    "compat.on_device": "OnDevice",
    "compat.seed": "set_random_seed",
    "zero.api": (
        "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
        "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
        "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
        "safe_set_local_optimizer_state safe_update_full_grad_vectorized set_z3_leaf_module "
        "set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix get_z3_leaf_modules "
        "unset_z3_leaf_modules z3_leaf_module"
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

_MODULES = ("zero_to_fp32", "zero_to_torch")

__all__ = sorted([*_MODULES, *_HOME_OF])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(
            f"module 'dslaunch.utils' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(f"..runtime.{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__

"""`dslaunch.zero`: the calls with which a program speaks to ZeRO itself.

Everything here works at every stage, and is a collective: all ranks must call it, in the same order.
"""

from __future__ import annotations

from torch import nn

from ..errors import ConfigError
from .gathered_parameters import GatheredParameters
from .init_context import Init
from .model.offload_kinds import OffloadDeviceEnum, OffloadStateTypeEnum
from .param_access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from .param_location import location_of
from .parameters.param_status import ZeroParamStatus
from .units.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "ZeroParamStatus",
    "get_z3_leaf_modules",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Have this parameter here whenever `module` runs, which uses it but does not own it.

    Not needed: a use of a parameter outside its module is noticed by itself. May be called before
    `initialize()`, as in an `__init__`; the module must not run between the two.
    Errors: ConfigError if it is no parameter
    """
    if not isinstance(parameter, nn.Parameter):
        raise ConfigError(
            f"register_external_parameter(): a {type(parameter).__name__} was given; give a "
            "parameter of a module"
        )

    def unshard_until_end(module: nn.Module, args: object) -> None:
        location = location_of(parameter)
        if location is not None:
            location.model.unshard_until_end(location.unit)

    module.register_forward_pre_hook(unshard_until_end)

"""Parameters of experts in groups of their own: functions that programs for DeepSpeed's layers call.

A parameter of an expert has `allreduce = False`; `group_name` says over how many ranks experts are divided.

Source: DeepSpeed 0.19.8 moe/utils.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .layer import MoE

Group = dict[str, Any]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether the model has layers MoE, and how many experts the first one has."""
    layer = next((one for one in m.modules() if isinstance(one, MoE)), None)
    return (False, 0) if layer is None else (True, layer.num_experts)


def is_moe_param(param: Tensor) -> bool:
    """Return whether the parameter is an expert's."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Group) -> bool:
    """Return whether the group is one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of the dense layers, and those of experts."""
    params = list(params)
    return [one for one in params if not is_moe_param(one)], [one for one in params if is_moe_param(one)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the dense layers, and those of experts; a parameter without one is left out."""
    shared, experts = split_params_into_shared_and_expert_params(one for one in group if one.grad is not None)
    return [one.grad for one in shared if one.grad is not None], [
        one.grad for one in experts if one.grad is not None
    ]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Group | Sequence[Group], max_group_size: float | None = 178956971
) -> list[Group]:
    """Return the groups without parameters of experts, followed by groups of these, which have `moe: True`:
    one for each given group and number of ranks, or several of at most `max_group_size` elements each.

    Errors: ValueError for an object that is no group, or for a group with parameters of experts and no `name`
    """
    if not isinstance(param_groups, dict | list | tuple):
        raise ValueError(
            f"param_groups is a {type(param_groups).__name__}: give a parameter group or a list of them"
        )
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    of_experts: list[Group] = []
    for group in groups:
        shared, experts = split_params_into_shared_and_expert_params(group["params"])
        group["params"] = shared
        if experts and "name" not in group:
            raise ValueError(
                f"a parameter group has parameters of experts and no name, only {', '.join(group)}; write "
                "'name': 'parameters' into it"
            )
        for name in sorted({_group_name(one) for one in experts}):
            own = [one for one in experts if _group_name(one) == name]
            of_experts += [
                {**group, "name": name, "moe": True, "params": params}
                for params in _in_pieces(own, max_group_size)
            ]
    return groups + of_experts


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Group]:
    """Return parameters, or groups of them, as groups in which those of experts are apart.

    Errors: TypeError for an object that an optimizer would not take
    """
    for item in model_parameters:
        if not isinstance(item, Tensor | dict):
            raise TypeError(
                f"model_parameters has a {type(item).__name__}: an optimizer takes tensors or groups, which "
                "are dicts"
            )
    if model_parameters and isinstance(model_parameters[0], dict):
        if any("moe" in group for group in model_parameters):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer(
        {"params": model_parameters, "name": "dense-params"}
    )


def _group_name(param: Tensor) -> str:
    return str(getattr(param, "group_name", ""))


def _in_pieces(params: Sequence[Tensor], most: float | None) -> list[list[Tensor]]:
    pieces: list[list[Tensor]] = []
    size = 0.0
    for param in params:
        numel = getattr(param, "ds_numel", param.numel())
        if not pieces or (most is not None and size + numel > most):
            pieces.append([])
            size = 0.0
        pieces[-1].append(param)
        size += numel
    return pieces

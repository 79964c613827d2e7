"""What programs call to sort the parameters of experts out, in a package where all experts are on every rank.

A parameter that says `allreduce = False` belongs, in DeepSpeed, to an expert that lives on some ranks only.
No layer here makes such parameters, so what is sorted is all of one kind; one that a program has marked so by
itself is refused, because it would be averaged over all ranks.

Source: DeepSpeed 0.19.8 moe/utils.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

Group = dict[str, Any]


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Return whether the model has DeepSpeed's layers of experts, and how many experts the first
    one has: none here.
    """
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Return whether the parameter is marked as one of an expert that lives on some ranks only."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Group) -> bool:
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
    """Return the groups as a list, each with its parameters as a list: nothing here need be split off.

    Errors: ValueError for what is no group; NotImplementedError for a parameter that is marked as an expert's
    """
    if not isinstance(param_groups, dict | list | tuple):
        raise ValueError(
            f"param_groups is a {type(param_groups).__name__}: give a parameter group or a list of them"
        )
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = list(group["params"])
        if any(is_moe_param(one) for one in group["params"]):
            raise NotImplementedError(
                "a parameter has allreduce=False, which marks experts that live on different ranks; dslaunch "
                'trains experts on every rank: leave the mark out; see "Experts" in '
                "docs/reference/compatibility.md"
            )
    return groups


def configure_moe_param_groups(model_parameters: Sequence[Any]) -> list[Group]:
    """Return parameters, or groups of them, as groups."""
    is_grouped = bool(model_parameters) and isinstance(model_parameters[0], dict)
    groups = (
        list(model_parameters) if is_grouped else [{"params": list(model_parameters), "name": "dense-params"}]
    )
    return split_params_into_different_moe_groups_for_optimizer(groups)

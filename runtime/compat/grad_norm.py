"""Norms of gradients, for loops that clip on their own: an engine's step()
clips what `gradient_clipping` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.process_group import group_device
from ..errors import ConfigError
from ..zero.param_location import location_of

_EPS = 1e-6  # DeepSpeed's and torch's: a norm of 0 must not divide
_INVALID = -1.0


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: object | None = None
) -> Tensor:
    """Scale the gradients down to `max_norm`, if their norm is above it;
    returns the norm they had, on their device.

    The norm is averaged over the ranks, whose gradients should be the same.
    Order:  every rank must call this, if there are several
    Errors: ConfigError for parameters that an engine has
    Source: DeepSpeed 0.19.8 runtime/utils.py, `clip_grad_norm_`
    """
    _refuse_mpu("clip_grad_norm_", mpu)
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    engines = next((location for location in map(location_of, given) if location is not None), None)
    if engines is not None:
        raise ConfigError(
            f"clip_grad_norm_() of '{engines.name}', which an engine has: its gradients are whole in "
            "step() only; set gradient_clipping in the ds_config, and call "
            "engine.get_global_grad_norm() for the norm"
        )
    grads = [param.grad for param in given if param.grad is not None]
    # the group's also if this rank's data has reached no parameter
    device = given[0].device if given else group_device()
    norm = _norm(grads, norm_type, device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        norm /= dist.get_world_size()
        dist.all_reduce(norm)
    scale = (max_norm / (norm + _EPS)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device))
    return norm


def get_global_norm(norm_list: Iterable[float | Tensor]) -> float:
    """Return the 2-norm of all, given that of each part; infinity if one is negative,
    infinite or not a number.
    """
    norms = [float(norm) for norm in norm_list]
    if any(is_invalid_grad_norm(norm) for norm in norms):
        return math.inf
    return math.sqrt(sum(norm**2 for norm in norms))


@torch.no_grad()
def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor],
    norm_type: float = 2,
    mpu: object | None = None,
    moe_ep_group: object | None = None,
) -> Tensor:
    """Return the norm of all these tensors of this rank as one vector, float32;
    -1 if it is infinite or not a number.
    """
    _refuse_mpu("get_global_norm_of_tensors", mpu if moe_ep_group is None else moe_ep_group)
    norm = _norm(input_tensors, norm_type, input_tensors[0].device)
    return norm.masked_fill_(~norm.isfinite(), _INVALID)


@torch.no_grad()
def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: float | Tensor | None = None,
    mpu: object | None = None,
    eps: float = _EPS,
) -> float | Tensor:
    """Scale the tensors down to `max_norm`, if their norm, or `global_norm`, is above it;
    returns that norm.
    """
    _refuse_mpu("clip_tensors_by_global_norm", mpu)
    norm = get_global_norm_of_tensors(input_tensors) if global_norm is None else global_norm
    scale = max_norm / (norm + eps)
    if scale < 1:
        for tensor in input_tensors:
            tensor.mul_(scale)
    return norm


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return whether an element is inf or NaN; of a sparse tensor only the stored elements count.

    Shapes: [] bool on the tensor's device
    """
    values = x._values() if x.is_sparse else x
    return ~values.detach().isfinite().all()


def is_invalid_grad_norm(norm: float | Tensor) -> bool:
    """Whether a norm is negative, infinite or not a number; of several, whether one is."""
    if isinstance(norm, Tensor):
        return bool((~norm.isfinite() | (norm < 0)).any())
    return not math.isfinite(norm) or norm < 0


def _norm(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """[] float32"""
    if not tensors:
        return torch.zeros((), device=device)
    norms = [torch.linalg.vector_norm(one.detach().float(), ord=norm_type).to(device) for one in tensors]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms), ord=norm_type)
    return whole


def _refuse_mpu(name: str, mpu: object | None) -> None:
    if mpu is not None:
        raise ConfigError(
            f"{name}(): engine.step() clips by the norm of the whole model; leave mpu and moe_ep_group out"
        )

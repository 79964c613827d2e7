"""One model, divided over the ranks of the axis tp before it is placed in flat buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor, nn

from ...shared.axes import HOLDERS, Axes
from ..comm.agreement import agree
from ..comm.mesh import Axis, make_axis
from ..config import Config
from ..config.tensor import TensorParallelConfig
from ..errors import ConfigError
from ..log import logger
from ..mesh.cut import Cut, cut_evenly
from ..zero.parameters.early_parameter import early_of
from .divided_model import DividedModel, earlier_division
from .exchange import TensorAxis
from .lower import Division, is_dtensor, lower
from .plan import TensorPlan, check_heads, choose_plan, plan_of_model, rope_size
from .styles import Packs, PartialGradients, PartlyRotated
from .vocabulary import check_head, use_parts_of_logits


def agree_on_division(settings: Config, *, on_meta: str) -> None:
    """Check that all ranks, including those that divide nothing, divide the model, its experts and its
    sequences in the same way, and send values of the same parameters; otherwise some would wait for others
    for ever. `on_meta` says which parameters have no values.

    Order:  a collective
    Errors: ConfigError with what two ranks were given
    """
    own = {
        "tensor_parallel": _said(settings.tensor_parallel),
        "sequence_parallel_size": str(settings.sp_size),
        "expert_parallel": _said(settings.expert_parallel),
        "mesh": _said(settings.mesh),
        "parameters on the meta device": on_meta,
    }
    agree(own, what="settings", cure="give initialize() the same ds_config on every rank")


def _said(section: BaseModel | None) -> str:
    return "left out" if section is None else section.model_dump_json(exclude_defaults=True)


def divide(
    module: nn.Module, axes: Axes, settings: TensorParallelConfig, *, device: torch.device
) -> DividedModel:
    """Divide the layers of a model over the axis tp, in place.

    Parameters get rank 0's values first. A model that torch's parallelize_module() or Hugging Face's loading
    has divided stays as it is divided.

    Order:  a collective
    Errors: ConfigError, with names, if no plan fits the model or a parameter cannot be divided
    """
    known = earlier_division(module)
    if known is not None:
        return known.again(settings)
    return _divide(module, axes, settings, device=device)


def _divide(
    module: nn.Module, axes: Axes, settings: TensorParallelConfig, *, device: torch.device
) -> DividedModel:
    rank = dist.get_rank()
    place = axes.coordinates(rank)["tp"]
    axis = TensorAxis(size=axes.tp, index=place)
    is_divided = any(is_dtensor(param) for param in module.parameters())
    is_by_torch = is_divided and not _is_of_hugging_face(module)
    if is_divided:
        _check_has_no_rules(settings, is_by_torch=is_by_torch)
    if is_by_torch:
        return DividedModel(module, axis, lower(module, axes, rank=rank), settings=settings)
    has_rules = settings.partition_config is not None and bool(settings.partition_config.layer_specs)
    if not has_rules:
        check_heads(module, axes.tp)
    if is_divided:
        _undo_forwards(module)
    plan = choose_plan(module, settings, is_stage=axes.pp > 1)
    if has_rules:
        check_heads(module, axes.tp, plan)
    plan = plan if is_divided else _without_ties(module, plan, is_stage=axes.pp > 1)
    # Steps that may fail come before the first parameter is replaced.
    if settings.vocab_parallel_lm_head:
        check_head(module, plan)
    if is_divided:
        division = lower(module, axes, rank=rank, shows=False)
    else:
        planned = _plan_cuts(module, plan, axis)
        _check_agreement(module, plan, axes)
        holders = make_axis(axes.lines(HOLDERS), takes_default=True)
        division = _cut(planned, holders, device=device)
        holders.without_group()
    _install(module, plan, axis, division)
    if settings.vocab_parallel_lm_head:
        use_parts_of_logits(module, axis)
    return DividedModel(module, axis, division, settings=settings)


def _is_of_hugging_face(module: nn.Module) -> bool:
    return any(getattr(one, "_is_hooked", False) for one in module.modules()) and bool(plan_of_model(module))


def _check_has_no_rules(settings: TensorParallelConfig, *, is_by_torch: bool) -> None:
    """Refuse rules of the ds_config for a model that was divided before initialize()."""
    key = None
    if settings.partition_config is not None and settings.partition_config.layer_specs:
        key = "partition_config.layer_specs"
    elif settings.vocab_parallel_lm_head and is_by_torch:
        key = "vocab_parallel_lm_head"
    if key is not None:
        how = "parallelize_module()" if is_by_torch else "its loading"
        raise ConfigError(
            f"tensor_parallel.{key} cannot be followed: {how} has divided the model by another plan "
            "already; leave one of the two out"
        )


def _undo_forwards(module: nn.Module) -> None:
    """Remove the forwards that Hugging Face's loading has put in; dslaunch's compute with plain tensors."""
    for submodule in module.modules():
        if getattr(submodule, "_is_hooked", False):
            vars(submodule).pop("forward", None)


def _check_agreement(module: nn.Module, plan: TensorPlan, axes: Axes) -> None:
    """Check that all ranks divide the same model; otherwise they would wait for each other for ever."""
    text = "\n".join(
        f"{name} {tuple(param.shape)} {param.dtype} {param.requires_grad}"
        for name, param in module.named_parameters()
    )
    own = crc32(f"{text}\n{sorted(plan.params)}\n{sorted(plan.modules)}".encode())
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (own, bool(plan.params)))
    if not any(has_plan for _, has_plan in everywhere):
        raise ConfigError(
            "tensor_parallel.partition_config.layer_specs fits no layer of any stage, so nothing would be "
            "divided; see the names of the module's parameters"
        )
    for line in axes.lines(HOLDERS):
        for rank in line:
            if everywhere[rank] != everywhere[line[0]]:
                raise ConfigError(
                    f"rank {rank} and rank {line[0]} were given different models to divide: names, shapes, "
                    "dtypes and requires_grad of all parameters and the plan must agree; build the model the "
                    "same way on every rank"
                )


def _without_ties(module: nn.Module, plan: TensorPlan, *, is_stage: bool) -> TensorPlan:
    """Leave out parameters that another module, which the plan does not name, uses whole.

    Errors: ConfigError if nothing remains, unless the model is one of several stages
    """
    holders: dict[int, list[str]] = {}
    for prefix, one in module.named_modules():  # each module once: one module in two places is no tie
        for key, param in one._parameters.items():
            if param is not None:
                holders.setdefault(id(param), []).append(f"{prefix}.{key}" if prefix else key)
    left_out: dict[str, str] = {}
    for names in holders.values():
        planned = [name for name in names if name in plan.params]
        if planned and len(planned) < len(names):
            other = next(name for name in names if name not in planned)
            left_out |= {name.rpartition(".")[0]: other for name in planned}
    for name, other in sorted(left_out.items()):
        logger.info("'%s' stays whole: its parameter is also '%s', which no rule divides", name, other)
    if left_out and left_out.keys() >= plan.modules.keys() and not is_stage:
        name, other = next(iter(left_out.items()))
        raise ConfigError(
            f"the plan divides '{name}' and no other layer, and its parameter is also '{other}', which no "
            "rule divides, so nothing would be divided: give rules for both, or name other layers in "
            "tensor_parallel.partition_config"
        )
    return TensorPlan(
        params={
            name: style for name, style in plan.params.items() if name.rpartition(".")[0] not in left_out
        },
        modules={name: style for name, style in plan.modules.items() if name not in left_out},
    )


class _Planned(NamedTuple):
    """A parameter of a module, and which part of it this rank will hold."""

    owner: nn.Module
    key: str
    param: nn.Parameter
    cut: Cut


def _plan_cuts(module: nn.Module, plan: TensorPlan, axis: TensorAxis) -> list[_Planned]:
    """Return what will be cut, tied parameters once for each module that has them.

    Errors: ConfigError for a parameter that cannot be divided so
    """
    planned: list[_Planned] = []
    named = dict(module.named_modules())
    cuts: dict[int, Cut] = {}
    for name, style in plan.params.items():
        owner, _, key = name.rpartition(".")
        param = named[owner]._parameters[key]
        rule = None if param is None else style.cut(tuple(param.shape))
        if param is None or rule is None:
            continue
        cut = _cut_of(name, tuple(param.shape), rule, axis)
        if cuts.setdefault(id(param), cut) != cut:
            raise ConfigError(
                f"parameter '{name}' is tied to another one, and the plan divides the two differently; give "
                "both the same dimension, or leave one out"
            )
        planned.append(_Planned(named[owner], key, param, cut))
    return planned


@torch.no_grad()
def _cut(planned: Iterable[_Planned], holders: Axis, *, device: torch.device) -> Division:
    done = Division()
    for owner, key, param, cut in planned:
        if id(param) not in done.successors:
            leaf = nn.Parameter(_part(param, cut, holders, device), requires_grad=param.requires_grad)
            done.successors[id(param)] = leaf
            done.kept.append(param)
            done.cuts.append((leaf, cut))
        owner._parameters[key] = done.successors[id(param)]
    return done


def _cut_of(name: str, shape: tuple[int, ...], rule: tuple[int, Packs], axis: TensorAxis) -> Cut:
    dim, packs = rule
    length = shape[dim]
    if isinstance(packs, int):
        if length % packs:
            raise ConfigError(f"parameter '{name}' of shape {shape} does not fall into {packs} equal parts")
        packs = (length // packs,) * packs
    if sum(packs) != length:
        raise ConfigError(
            f"parameter '{name}' has {length} elements along dimension {dim % len(shape)}, and the parts "
            f"{list(packs)} have {sum(packs)} together"
        )
    if len(packs) > 1 and any(one % axis.size for one in packs):
        raise ConfigError(
            f"parameter '{name}' consists of parts of {list(packs)}, which {axis.size} ranks do not divide"
        )
    if min(packs) < axis.size:
        raise ConfigError(
            f"parameter '{name}' of shape {shape} cannot be divided over {axis.size} ranks along dimension "
            f"{dim % len(shape)}; use fewer ranks for tensor_parallel.autotp_size"
        )
    return cut_evenly(shape, dim, index=axis.index, size=axis.size, packs=packs)


def _part(param: nn.Parameter, cut: Cut, holders: Axis, device: torch.device) -> Tensor:
    early = early_of(param)
    if early is not None:  # zero.Init has sharded it: gather it for the cut
        early.take_out()
    whole = param.detach()
    if not whole.is_meta:  # else it has no values yet
        whole = whole.to(device).contiguous()
        dist.broadcast(whole, group=holders.group, group_src=0)
    part = cut.take(whole)
    param.data = param.data.new_empty(0)  # the previous tensor is no parameter of the model any more
    return part


def _install(module: nn.Module, plan: TensorPlan, axis: TensorAxis, division: Division) -> None:
    named: dict[str, Any] = dict(module.named_modules())
    division.names = {id(param): name for name, param in module.named_parameters()}
    for name, style in plan.modules.items():
        if style.forward is None:
            continue
        submodule = named[name]
        if style.forward is PartialGradients:
            PartialGradients(submodule, axis, name, division)
        elif style.forward is PartlyRotated:
            submodule.forward = PartlyRotated(
                submodule, axis, name, division, rope_size=rope_size(module, name)
            )
        else:
            submodule.forward = style.forward(submodule, axis, name, division)

"""DTensor parameters become plain ones.

The parameters of a unit are views of a flat buffer, which a DTensor cannot be. So the part of a DTensor that
this rank holds becomes the parameter, and in its module's forward a DTensor is made of the part. The backward
of this gives the part its gradient, summed over ranks where each has a share of it.

Source: torch 2.13 distributed/tensor/_api.py, `DTensor.from_local`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...shared.axes import Axes
from ..errors import ConfigError
from ..mesh.cut import Cut, cut_evenly
from ..zero.access.module_parameters import parameters_of

DTensor = Any  # torch.distributed.tensor is imported for a model with DTensors only


@dataclass(kw_only=True)
class Division:
    """Result of a division of a model's parameters."""

    cuts: list[tuple[nn.Parameter, Cut]] = field(default_factory=list)  # parameters that are divided, and how
    # id of the previous parameter -> the new one
    successors: dict[int, nn.Parameter] = field(default_factory=dict)
    # previous parameters, kept so that their ids are not reused
    kept: list[Any] = field(default_factory=list)
    # by id: whole parameters whose gradients are added over ranks, and their names; see part_gradients.py
    added: dict[int, nn.Parameter] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    num_forwards: Counter[str] = field(default_factory=Counter)  # name of a layer -> forwards

    def is_whole(self) -> bool:
        """Tell whether parameters are whole now, as inside GatheredParameters."""
        return all(tuple(param.shape) == cut.shape for param, cut in self.cuts)


def is_dtensor(param: Tensor) -> bool:
    """True if the parameter is a DTensor."""
    return hasattr(param, "placements") and hasattr(param, "to_local")


def size_of_plan(module: nn.Module) -> int:
    """Return over how many ranks the module's DTensors are divided; 1 if there are none.

    Errors: ConfigError unless all are divided along one axis, or if fully_shard() has divided the module
    """
    for name, one in module.named_modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(one).__mro__):
            shown = f"'{name}'" if name else "the model"
            raise ConfigError(
                f"fully_shard() has divided {shown} over ranks; give initialize() the plain model and leave "
                "that call out: zero_optimization.stage 3 does what fully_shard() does"
            )
    sizes: dict[int, str] = {}
    params: dict[str, Any] = dict(module.named_parameters())
    for name, param in params.items():
        if not is_dtensor(param):
            continue
        mesh = param.device_mesh
        if mesh.ndim != 1:
            raise ConfigError(
                f"parameter '{name}' is a DTensor on a mesh with axes {mesh.mesh_dim_names or mesh.ndim}: "
                "initialize() takes one axis, tp, of a tensor-parallel plan"
            )
        sizes.setdefault(mesh.size(), name)
    if len(sizes) > 1:
        (one, first), (other, second), *_ = sizes.items()
        raise ConfigError(
            f"parameter '{first}' is divided over {one} ranks and parameter '{second}' over {other}; use one "
            "device mesh for the whole plan"
        )
    return next(iter(sizes), 1)


def lower(module: nn.Module, axes: Axes, *, rank: int, shows: bool = True) -> Division:
    """Replace all DTensor parameters, in place; `shows`: in forwards they still appear as DTensors.

    Errors: ConfigError for a mesh that is not the job's axis tp, and for placements that are no parts
    """
    done = Division()
    line = axes.line_of(rank, ("tp",))
    _check(module, line)
    for submodule in module.modules():
        params: dict[str, Any] = dict(submodule._parameters)
        for name, param in params.items():
            if param is None or not is_dtensor(param):
                continue
            if shows:
                parameters_of(submodule).shows[name] = _show(param)
            leaf = done.successors.get(id(param))
            if leaf is None:
                leaf = nn.Parameter(param.to_local().detach().clone(), requires_grad=param.requires_grad)
                done.successors[id(param)] = leaf
                done.kept.append(param)
                _note_cut(param, leaf, done, index=line.index(rank))
            submodule._parameters[name] = leaf
    return done


def _check(module: nn.Module, line: tuple[int, ...]) -> None:
    params: dict[str, Any] = dict(module.named_parameters())
    for name, param in params.items():
        if not is_dtensor(param):
            continue
        (placement,) = param.placements
        ranks = tuple(param.device_mesh.mesh.tolist())
        if ranks != line:
            raise ConfigError(
                f"parameter '{name}' is a DTensor over ranks {list(ranks)}, and this rank's axis tp is "
                f"{list(line)}: of neighbours, the innermost axis; make the mesh so: init_device_mesh(..., "
                '(data, tensor), mesh_dim_names=("dp", "tp"))["tp"]'
            )
        if not (placement.is_replicate() or _is_cut(placement)):
            raise ConfigError(
                f"parameter '{name}' is a DTensor of placement {placement}; parameters are Shard or Replicate"
            )


def _is_cut(placement: Any) -> bool:
    return hasattr(placement, "dim")  # Shard, and torch's strided one, which is no Shard since 2.10


def _note_cut(param: DTensor, leaf: nn.Parameter, done: Division, *, index: int) -> None:
    (placement,) = param.placements
    if not _is_cut(placement):
        return
    shape, dim, size = tuple(param.shape), placement.dim, param.device_mesh.size()
    count = getattr(placement, "split_factor", 1)
    packs = None if count == 1 else [shape[dim] // count] * count
    cut = cut_evenly(shape, dim, index=index, size=size, packs=packs)
    if cut.part_shape != tuple(leaf.shape):
        raise AssertionError(f"{placement} of {shape} gives {tuple(leaf.shape)}, not {cut.part_shape}")
    done.cuts.append((leaf, cut))


def _show(param: DTensor) -> Callable[[Any], Any]:
    return partial(
        type(param).from_local,
        device_mesh=param.device_mesh,
        placements=param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )

"""Cutting a model into units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from ...errors import ConfigError
from ...placement.stage_policy import UnitSizes
from ...strided import is_strided, kind_of
from ..parameters.early_parameter import early_of
from ..parameters.freed_parameter import check_kept, is_freed
from ..parameters.shared_memory import first_sharing, is_expanded
from ..parameters.valueless import is_valueless
from ..parameters.wrapped import unwrapped

_CONTAINERS = (nn.ModuleList, nn.Sequential)
ROOT = "root"
# Size up to which neighbours are merged: 32 MB of float32 uses a wire well, and two of them under way fit
# into caches and hide each other's waiting. Over gloo, steps of 19 million parameters took 180 ms so, and 270
# ms with all of them in one unit.
MERGED_NUMEL = 8 << 20
IsLeaf = Callable[[str, nn.Module], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """The parameters of one unit by full name, in definition order; a tied parameter goes
    by its first name.
    """

    name: str
    params: tuple[tuple[str, nn.Parameter], ...]
    modules: tuple[nn.Module, ...]  # modules whose forward uses them, with all below

    @property
    def numel(self) -> int:
        return sum(param.numel() for _, param in self.params)


def cut_into_units(
    module: nn.Module, *, sizes: UnitSizes, is_leaf: IsLeaf = lambda name, module: False
) -> tuple[UnitPlan, ...]:
    """Return the units of a model, in definition order, the root unit last.

    Each child of a ModuleList or Sequential is a unit, and beside these each module that has none of them
    inside; neighbours are merged while they stay within `sizes`. All other parameters, and those that two
    units share, form the root unit, which is always there. A module that `is_leaf(name, module)` is not
    looked into; where the model itself is one, the root unit has all.
    Errors: ConfigError for a parameter without storage, or two that share one without being the same object
    """
    params = dict(module.named_parameters())
    _check_storage(unwrapped(params.items()))
    for name, buffer in module.named_buffers():
        if isinstance(buffer, nn.parameter.UninitializedBuffer):
            raise ConfigError(f"buffer '{name}' has no shape yet; run the model once before initialize()")
    blocks = [] if is_leaf("", module) else list(_blocks(module, "", is_leaf))
    owner_of = _owners(blocks)
    plans = [
        UnitPlan(
            name=name,
            params=tuple(item for item in params.items() if owner_of.get(id(item[1])) == index),
            modules=(child,),
        )
        for index, (name, child) in enumerate(blocks)
    ]
    rest = tuple(item for item in params.items() if id(item[1]) not in owner_of)
    merged = _merge([plan for plan in plans if plan.params], sizes)
    return (*merged, UnitPlan(name=ROOT, params=rest, modules=(module,)))


def _blocks(module: nn.Module, prefix: str, is_leaf: IsLeaf) -> Iterator[tuple[str, nn.Module]]:
    is_container = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        full_name = f"{prefix}{name}"
        is_block = not isinstance(child, _CONTAINERS)
        if is_leaf(full_name, child) or (is_block and (is_container or not _has_container(child))):
            yield full_name, child
        else:
            yield from _blocks(child, f"{full_name}.", is_leaf)


def _has_container(module: nn.Module) -> bool:
    return any(isinstance(one, _CONTAINERS) for one in module.modules())


def _owners(blocks: list[tuple[str, nn.Module]]) -> dict[int, int]:
    """Return the block of each parameter that exactly one block uses."""
    owner_of: dict[int, int] = {}
    shared: set[int] = set()
    for index, (_, child) in enumerate(blocks):
        for param_id in {id(param) for param in child.parameters()}:
            if owner_of.setdefault(param_id, index) != index:
                shared.add(param_id)
    return {param_id: index for param_id, index in owner_of.items() if param_id not in shared}


def _merge(plans: list[UnitPlan], sizes: UnitSizes) -> tuple[UnitPlan, ...]:
    runs: list[list[UnitPlan]] = []
    for plan in plans:
        longer = [*runs[-1], plan] if runs else [plan]
        is_small = sizes.are_small(param.numel() for member in longer for _, param in member.params)
        max_numel = min(sizes.max_whole_numel if is_small else sizes.max_numel, MERGED_NUMEL)
        if runs and sum(member.numel for member in longer) <= max_numel:
            runs[-1].append(plan)
        else:
            runs.append([plan])
    return tuple(
        UnitPlan(
            name=run[0].name if len(run) == 1 else f"{run[0].name} to {run[-1].name}",
            params=tuple(item for plan in run for item in plan.params),
            modules=tuple(module for plan in run for module in plan.modules),
        )
        for run in runs
    )


def parameters_here(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return those in memory that a program has chosen: others' values were put, or will be, into memory
    of their own.
    """
    return {name: param for name, param in module.named_parameters() if not _is_away(param)}


def _is_away(param: nn.Parameter) -> bool:
    early = early_of(param)
    return (early is not None and not early.is_whole) or is_freed(param)


def _check_storage(params: dict[str, nn.Parameter]) -> None:
    here: dict[str, nn.Parameter] = {}
    for name, param in params.items():
        _check_has_values(name, param)
        if is_freed(param) and early_of(param) is None:
            check_kept(param, name)  # another engine gives it
        if _is_away(param):
            continue
        if param.is_inference():
            raise ConfigError(
                f"parameter '{name}' was made in torch.inference_mode(), and can never be trained; make the "
                "model outside, or in torch.no_grad()"
            )
        if is_valueless(param):
            continue
        if is_expanded(param):
            raise ConfigError(
                f"parameter '{name}' is expanded: several of its elements are the same number in memory, "
                "which no optimizer can step; expand it in the forward, or make it with .clone()"
            )
        here[name] = param
    pair = first_sharing(list(here.values()))
    if pair is not None:
        name, other = (list(here)[place] for place in pair)
        raise ConfigError(
            f"parameters '{name}' and '{other}' share their storage but are two objects; tie them by "
            "assigning one nn.Parameter to both modules"
        )


def _check_has_values(name: str, param: nn.Parameter) -> None:
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ConfigError(f"parameter '{name}' has no shape yet; run the model once before initialize()")
    if param.is_meta:
        raise ConfigError(f"parameter '{name}' is on the meta device; give it storage before initialize()")
    if not (is_strided(param) or param.is_quantized):
        raise ConfigError(
            f"parameter '{name}' is {kind_of(param)}, whose elements cannot lie in a flat buffer; hold what "
            "it is made of as parameters and buffers, and make it in the forward: "
            "torch.sparse_coo_tensor(self.indices, self.values, shape), for example"
        )

"""The plan of one pass over the weights: data only, and the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..checkpoint.export.output_plan import Spec
from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Tensors of the model, and what is made of them together."""

    sources: Mapping[str, Spec]
    outs: Mapping[str, Spec]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutGroup:
    """Conversions whose sources are gathered together."""

    stages: tuple[int, ...]  # stages that hold the sources; the first of them sends them to the others
    held: tuple[str, ...]  # names of all that is gathered
    conversions: tuple[Conversion, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of the largest element that comes out."""
        return max((spec.dtype.itemsize for one in self.conversions for spec in one.outs.values()), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutPlan:
    """All groups, in the order in which they come."""

    groups: tuple[OutGroup, ...] = ()
    # another name of a tied tensor -> the name under which it comes
    aliases: Mapping[str, str] = field(default_factory=dict)
    no_tensors: tuple[str, ...] = ()  # names in the state_dict of what is no dense tensor

    def specs(self) -> dict[str, Spec]:
        """Return shape and dtype of each tensor, in the order in which they come."""
        return {
            name: spec
            for group in self.groups
            for conversion in group.conversions
            for name, spec in conversion.outs.items()
        }

    def by_itemsize(self) -> OutPlan:
        """Return the plan in the order of `plan_output`: elements of 8 bytes come first, then those of 4, 2
        and 1.
        """
        return replace(self, groups=tuple(sorted(self.groups, key=lambda group: -group.itemsize)))


def join_stages(plans: Sequence[OutPlan]) -> OutPlan:
    """Return the plan of all stages; what several of them hold comes once."""
    stages_of: dict[tuple[str, ...], tuple[int, ...]] = {}
    first: dict[tuple[str, ...], OutGroup] = {}
    for stage, group in ((stage, group) for stage, plan in enumerate(plans) for group in plan.groups):
        stages_of[group.held] = (*stages_of.get(group.held, ()), stage)
        first.setdefault(group.held, group)
    return OutPlan(
        groups=tuple(replace(group, stages=stages_of[held]) for held, group in first.items()),
        aliases={name: first for plan in plans for name, first in plan.aliases.items()},
        no_tensors=tuple(dict.fromkeys(name for plan in plans for name in plan.no_tensors)),
    )


def check_names(plan: OutPlan) -> None:
    """Errors: ConfigError if two tensors would have one name"""
    maker: dict[str, Conversion] = {}
    for conversion in (one for group in plan.groups for one in group.conversions):
        for name in conversion.outs:
            if name in maker:
                before, now = (next(iter(one.sources)) for one in (maker[name], conversion))
                raise ConfigError(
                    f"engine.weights(): '{before}' and '{now}' would both be called '{name}'; give each "
                    "parameter a name of its own"
                )
            maker[name] = conversion

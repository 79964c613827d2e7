"""The collectives of one pass over the weights, group after group of its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.export.output_plan import Spec
from ..mesh.domain import Domains
from ..zero.units.sub_buffer import SubBuffer
from .held import HeldTensor
from .out_plan import Conversion, OutGroup, OutPlan


class Gathered(NamedTuple):
    """The sources of a conversion."""

    conversion: Conversion
    tensors: dict[str, Tensor]  # empty where this rank gets none
    is_last: bool  # nothing more comes of what was gathered together


class WholeWeights:
    """Sources of conversions, whole, on the ranks that want them."""

    def __init__(
        self,
        plan: OutPlan,
        held: Mapping[tuple[str, ...], tuple[HeldTensor, ...]],
        domains: Domains,
        *,
        device: torch.device,
        to_all: bool,
    ) -> None:
        """`held` has what this rank holds of each group, by the names of its sources."""
        self._plan, self._held, self._domains = plan, held, domains
        self._device, self._to_all = device, to_all
        self._stage = domains.axes.coordinates(domains.job.index)["pp"]
        # this rank's counterparts in all stages, by stage
        self._line = domains.axes.line_of(domains.job.index, ("pp",))

    @property
    def is_wanted(self) -> bool:
        """Whether this rank gets the tensors."""
        return self._to_all or self._domains.job.is_first

    def __iter__(self) -> Iterator[Gathered]:
        """Yield each conversion with its sources, and whether it is the last one of its group; the sources
        are gone afterwards, but for what the caller keeps.

        Order: a collective, in which all ranks get to the end
        """
        for group in self._plan.groups:
            yield from self._of_group(group)

    def _of_group(self, group: OutGroup) -> Iterator[Gathered]:
        mine = self._held[group.held] if self._stage in group.stages else ()
        shards = dict.fromkeys(
            one.sub_buffer for one in mine if one.sub_buffer is not None and one.sub_buffer.is_sharded
        )
        views = {one: one.param_shard.gather_copy() for one in shards}
        by_name = {name: one for one in mine for name in one.names}
        for conversion in group.conversions:
            tensors: dict[str, Tensor] = {}
            for held in dict.fromkeys(by_name[name] for name in conversion.sources if mine):
                tensors |= self._whole(held, views)
            if len(self._line) > 1:
                tensors = self._between_stages(group, conversion.sources, tensors)
            yield Gathered(conversion, tensors, conversion is group.conversions[-1])

    def _whole(self, held: HeldTensor, views: Mapping[SubBuffer, tuple[Tensor, ...]]) -> dict[str, Tensor]:
        sub_buffer, name = held.sub_buffer, held.names[0]
        if held.beside is not None:
            whole = held.beside.clone(memory_format=torch.contiguous_format)
            self._domains.holders.broadcast(_bytes(whole), what=f"'{name}'")
            return {name: whole}
        if sub_buffer is None:
            raise AssertionError(f"'{name}' lies nowhere")
        member = sub_buffer.members[held.index]
        part = views[sub_buffer][held.index] if sub_buffer in views else member.param.detach()
        names = sub_buffer.domain.names
        if names is not None:
            values = names.gather(part, what=f"parameter '{member.name}'")
            return dict(zip(held.names, values, strict=True))
        return {name: sub_buffer.gather_parts(held.index, part)}

    # Messages between single ranks of different stages are no part of the comparison of collectives.

    def _between_stages(
        self, group: OutGroup, specs: Mapping[str, Spec], tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the tensors, which the group's first stage sends to the stages that do not hold them."""
        source = group.stages[0]
        stages = range(len(self._line)) if self._to_all else range(1)
        others = [place for place in stages if place not in group.stages]
        if not self._to_all and not self._domains.leads:
            return tensors
        if self._stage == source:
            for stage in others:
                for value in tensors.values():
                    if value.numel():
                        dist.send(_bytes(value), self._line[stage])
        elif self._stage in others:
            for name, spec in specs.items():
                value = tensors[name] = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                if value.numel():
                    dist.recv(_bytes(value), self._line[source])
        return tensors


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)

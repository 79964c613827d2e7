"""Whole values of an engine's parameters and gradients, by the names of the whole model: a unit at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..engine.base import EngineBase
from ..strided import is_strided
from ..zero.gathered_parameters import GatheredParameters
from ..zero.parameters.packed import lies_in_unit
from ..zero.units.sub_buffer import SubBuffer
from ..zero.units.unit import Unit


class WholeValues:
    """The calls are collectives; each value is yielded on the one rank that writes it."""

    def __init__(self, engine: EngineBase) -> None:
        self._engine = engine
        self._is_first_of_tp = engine._axes.coordinates(engine.global_rank)["tp"] == 0

    def _sub_buffers(self) -> Iterator[tuple[Unit, SubBuffer]]:
        for unit in self._engine._model.units:
            for sub_buffer in unit.sub_buffers:
                yield unit, sub_buffer

    def _writes(self, sub_buffer: SubBuffer, index: int) -> bool:
        """Tell whether this rank writes the member: the first of those that have it."""
        parts = sub_buffer.domain.parts
        is_divided = parts is not None and sub_buffer.domain.cuts_of(sub_buffer.members[index].param)
        is_first = parts.group.is_first if parts is not None and is_divided else self._is_first_of_tp
        return is_first and sub_buffer.comm.sharers.is_first

    @torch.no_grad()
    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the averages over all ranks of the gradients so far, float32; times the loss scale."""
        model = self._engine._model
        model.check_averaged()
        model.settle()
        for sub_buffer in (one for _, one in self._sub_buffers() if one.is_trained):
            indices = range(len(sub_buffer.members))
            averages = sub_buffer.gradients.averages(indices, sub_buffer.comm)
            for index, average in zip(indices, averages, strict=True):
                whole = sub_buffer.gather_parts(index, average)
                if self._writes(sub_buffer, index):
                    yield sub_buffer.true_name(index), whole

    @torch.no_grad()
    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the values that the optimizer updates, float32."""
        for sub_buffer in (one for _, one in self._sub_buffers() if one.is_trained):
            yield from self._wholes(sub_buffer, self._masters(sub_buffer))

    @torch.no_grad()
    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's states that have a number for each element, as STATE/NAME."""
        for sub_buffer in (one for _, one in self._sub_buffers() if one.is_trained):
            for state in sorted(sub_buffer.optimizer_shard.state_names):
                with sub_buffer.here():
                    parts = self._parts(sub_buffer, sub_buffer.optimizer_shard.value_of(state))
                for name, whole in self._wholes(sub_buffer, parts):
                    yield f"{state}/{name}", whole

    def _wholes(self, sub_buffer: SubBuffer, parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        for index, part in enumerate(parts):
            whole = sub_buffer.gather_parts(index, part)
            if self._writes(sub_buffer, index):
                yield sub_buffer.true_name(index), whole

    def _masters(self, sub_buffer: SubBuffer) -> list[Tensor]:
        with sub_buffer.here():
            return self._parts(sub_buffer, sub_buffer.optimizer_shard.master)

    def _parts(self, sub_buffer: SubBuffer, own: Tensor) -> list[Tensor]:
        flat = sub_buffer.comm.gather_states(sub_buffer.on_device(own), what=sub_buffer.label)
        slots = sub_buffer.layout.slots
        return [flat[slot.offset : slot.offset + slot.numel].view(slot.shape).float() for slot in slots]

    @torch.no_grad()
    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the values of parameters that no optimizer steps, packed integers among them."""
        for _, sub_buffer in self._sub_buffers():
            if sub_buffer.is_trained:
                continue
            with GatheredParameters([member.param for member in sub_buffer.members]):
                for index, member in enumerate(sub_buffer.members):
                    if self._writes(sub_buffer, index):
                        yield sub_buffer.true_name(index), member.param.detach()
        for name, param in self._engine.module.named_parameters():
            if not lies_in_unit(param) and self._writes_beside(param):
                yield name, param.detach()

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the values of buffers."""
        for name, value in self._engine.module.named_buffers():
            if is_strided(value) and self._writes_beside(value):
                yield name, value

    def _writes_beside(self, value: Tensor) -> bool:
        """Tell whether this rank writes what lies in no unit."""
        return self._is_first_of_tp and self._engine._domains.of(value).comm.sharers.is_first

    @torch.no_grad()
    def stale(self) -> list[tuple[str, float, float]]:
        """Return the parameters whose values on this rank are not those that the optimizer has updated: the
        name, a value here that is wrong, and the right one.
        """
        found: list[tuple[str, float, float]] = []
        for _, sub_buffer in self._sub_buffers():
            if not sub_buffer.is_trained:
                continue
            masters = self._masters(sub_buffer)
            with GatheredParameters([member.param for member in sub_buffer.members]):
                for index, master in enumerate(masters):
                    param = sub_buffer.members[index].param.detach()
                    own = param if param.shape == master.shape else sub_buffer.part_of(index, param)
                    right = master.to(own.dtype)
                    if not torch.equal(own, right):
                        place = int((own.float() - right.float()).abs().nan_to_num(nan=torch.inf).argmax())
                        here, there = (float(one.reshape(-1)[place]) for one in (own, right))
                        found.append((sub_buffer.true_name(index), here, there))
        return found

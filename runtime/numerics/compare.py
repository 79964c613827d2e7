"""The comparison of two recordings: the first step, quantity and parameter that differ beyond rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..environment import CONFIGURED
from .bounds import Bounds, bounds_of
from .record import GRADIENT, PARAMETER, StepRecord, num_engines, num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value that differs beyond its bound."""

    engine: int
    step: int
    quantity: str
    name: str  # of the parameter; empty for a loss or a norm
    configured: float | None
    reference: float | None
    bound: float  # of their difference
    where: str  # which element, or on which rank
    hint: str = ""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Result of all steps up to the first difference."""

    facts: dict[str, Any]
    bounds: Bounds
    num_engines: int
    num_steps: int = 0  # compared
    num_parameters: int = 0
    difference: Difference | None = None
    largest: dict[str, float] = field(default_factory=dict)  # quantity -> largest part of its bound
    notes: dict[str, Any] = field(default_factory=dict)  # of the last step, on rank 0
    reference_facts: dict[str, Any] = field(default_factory=dict)

    def note(self, quantity: str, part: float) -> None:
        """Note how much of a bound a value takes up."""
        self.largest[quantity] = max(self.largest.get(quantity, 0.0), part)


def compare(folder: str, reference: str) -> Comparison:
    """Compare the run as configured with the run `reference`, in the order of steps, and in a step of losses,
    gradients, norm and parameters.

    Errors: FileNotFoundError if a run has recorded nothing
    """
    first = StepRecord(folder, CONFIGURED, 0, 0)
    facts = first.notes[0]
    result = Comparison(
        facts=facts, bounds=bounds_of(facts), num_engines=num_engines(folder, CONFIGURED)
    )
    result.reference_facts = StepRecord(folder, reference, 0, 0).notes[0]
    last = [min(num_steps(folder, part, one) for part in (CONFIGURED, reference))
            for one in range(result.num_engines)]
    result.num_parameters = len(first.names(PARAMETER))
    before = [StepRecord(folder, CONFIGURED, one, 0) for one in range(result.num_engines)]
    for step in range(1, max(last) + 1):
        for engine in range(result.num_engines):
            if step > last[engine]:
                continue
            one = _Step(result, engine, step, before[engine], folder, reference)
            before[engine] = one.own
            result.difference = next(one.differences(), None)
            if result.difference is not None:
                return result
            result.notes = one.own.notes[0]
        result.num_steps = step
    return result


class _Step:
    """One step of one engine in both runs."""

    def __init__(  # noqa: PLR0913
        self, result: Comparison, engine: int, step: int, before: StepRecord, folder: str, reference: str
    ) -> None:
        self._result, self._engine, self._step, self._before = result, engine, step, before
        self.own = StepRecord(folder, CONFIGURED, engine, step)
        self.other = StepRecord(folder, reference, engine, step)

    def differences(self) -> Iterator[Difference]:
        """Yield all that differs, in order."""
        yield from self._losses()
        own, other = self.own.notes[0], self.other.notes[0]
        if own["is_applied"] != other["is_applied"]:
            said = {True: "is applied", False: "is skipped"}
            yield self._found(
                "update", configured=None, reference=None, bound=0.0,
                where=f"it {said[own['is_applied']]} as configured, and {said[other['is_applied']]} in the other",
            )  # fmt: skip
        if not own["is_applied"]:
            return
        norm = other["norm"] or 0.0
        yield from self._gradients(norm)
        yield from self._norm(own["norm"], other["norm"])
        yield from self._parameters()

    def _losses(self) -> Iterator[Difference]:
        bounds, theirs = self._result.bounds, self.other.notes
        for rank, notes in self.own.notes.items():
            losses = theirs.get(rank, {}).get("losses", [])
            if len(notes["losses"]) != len(losses):
                yield self._found(
                    "number of losses", configured=len(notes["losses"]), reference=len(losses), bound=0.0,
                    where=f"on rank {rank}",
                )  # fmt: skip
                continue
            for number, (own, other) in enumerate(zip(notes["losses"], losses, strict=True)):
                if own is None or other is None:
                    if own is not other:
                        yield self._found("loss", configured=own, reference=other, bound=0.0,
                                          where=f"micro batch {number + 1} on rank {rank}")  # fmt: skip
                    continue
                bound = bounds.loss * max(abs(other), 1e-6)
                self._result.note("loss", abs(own - other) / bound)
                if abs(own - other) > bound:
                    yield self._found("loss", configured=own, reference=other, bound=bound,
                                      where=f"micro batch {number + 1} on rank {rank}")  # fmt: skip

    def _gradients(self, norm: float) -> Iterator[Difference]:
        bounds = self._result.bounds
        for name in self.other.names(GRADIENT):
            if not self.own.has(GRADIENT, name):
                yield self._found("gradient", name=name, configured=None, reference=None, bound=0.0,
                                  where="it is not there as configured")  # fmt: skip
                continue
            own, other = self.own.read(GRADIENT, name), self.other.read(GRADIENT, name)
            largest = float(other.abs().max()) if other.numel() else 0.0
            bound = max(bounds.gradient * largest, bounds.floor * norm)
            yield from self._tensors("gradient", name, own, other, torch.full_like(other, bound))

    def _norm(self, own: float | None, other: float | None) -> Iterator[Difference]:
        if own is None or other is None:
            return
        bound = self._result.bounds.norm * max(abs(other), 1e-12)
        self._result.note("norm", abs(own - other) / bound)
        if abs(own - other) > bound:
            yield self._found("norm", configured=own, reference=other, bound=bound, where="of all gradients")

    def _parameters(self) -> Iterator[Difference]:
        bounds = self._result.bounds
        for name in self.other.names(PARAMETER):
            own, other = self.own.read(PARAMETER, name), self.other.read(PARAMETER, name)
            before = self._before.read(PARAMETER, name)
            change = float((other - before).abs().max()) if other.numel() else 0.0
            bound = bounds.parameter * torch.maximum(other.abs(), before.abs()) + bounds.update * change
            yield from self._tensors("parameter", name, own, other, bound, before)
        for rank, notes in self.own.notes.items():
            for name, here, right in notes["stale"]:
                yield self._found(
                    "parameter", name=name, configured=here, reference=right, bound=0.0,
                    where=f"rank {rank} has not got the updated value",
                )  # fmt: skip

    def _tensors(  # noqa: PLR0913
        self, quantity: str, name: str, own: Tensor, other: Tensor, bound: Tensor, before: Tensor | None = None
    ) -> Iterator[Difference]:
        if own.shape != other.shape:
            yield self._found(quantity, name=name, configured=None, reference=None, bound=0.0,
                              where=f"its shape is {list(own.shape)}, and {list(other.shape)} in the other")  # fmt: skip
            return
        if not other.numel():
            return
        distance = (own.double() - other.double()).abs()
        distance = torch.where(own == other, 0.0, distance).nan_to_num(nan=torch.inf)
        part = (distance / bound.double().clamp_min(1e-38)).reshape(-1)
        worst = int(part.argmax())
        self._result.note(quantity, float(part[worst]))
        if float(part[worst]) <= 1.0:
            return
        place = [int(one) for one in torch.unravel_index(torch.tensor(worst), other.shape)]
        yield self._found(
            quantity, name=name, configured=float(own.reshape(-1)[worst]),
            reference=float(other.reshape(-1)[worst]), bound=float(bound.reshape(-1)[worst]),
            where=f"element {place} of {list(other.shape)}, the farthest beyond its bound",
            hint=_hint(own, other, before),
        )  # fmt: skip

    def _found(self, quantity: str, *, name: str = "", **more: Any) -> Difference:
        return Difference(engine=self._engine, step=self._step, quantity=quantity, name=name, **more)


def _hint(own: Tensor, other: Tensor, before: Tensor | None) -> str:
    """Return in words how the whole tensor differs; empty if no simple rule describes it."""
    own, other = own.double().reshape(-1), other.double().reshape(-1)
    if before is not None:
        own, other = own - before.double().reshape(-1), other - before.double().reshape(-1)
    what = "gradient" if before is None else "change"
    if not bool(own.isfinite().all()):
        return "it is not finite as configured"
    size, right = float(own.norm()), float(other.norm())
    if size == 0.0:
        return f"the whole {what} is 0 as configured"
    if right == 0.0:
        return f"the whole {what} is 0 in the other"
    cosine = float(own @ other) / (size * right)
    if cosine > 0.9999 and isfinite(size):
        return f"the whole {what} is {size / right:.4g} times that of the other"
    return ""

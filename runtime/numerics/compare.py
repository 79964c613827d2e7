"""The comparison of two recordings: the first step, quantity and parameter that differ beyond rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..environment import CONFIGURED
from .bounds import Bounds, bounds_of
from .record import BUFFER, GRADIENT, OTHER, PARAMETER, STATE, StepRecord, num_engines, num_steps

_SMALL = 1e-9  # bounds of numbers are not smaller than those of this one
_DENORMAL = 1e-37  # squares of gradients that are mere rounding have few bits left


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDifference:
    """One value that differs beyond its bound."""

    engine: int
    step: int
    quantity: str
    where: str  # which element, or on which rank
    name: str = ""  # the parameter's; empty for a loss or a norm
    configured: float | None = None
    reference: float | None = None
    bound: float = 0.0  # the largest difference that is allowed
    hint: str = ""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Result of all steps up to the first difference."""

    facts: dict[str, Any]
    bounds: Bounds
    num_engines: int
    num_steps: int = 0  # compared
    num_parameters: int = 0
    difference: FoundDifference | None = None
    largest: dict[str, float] = field(default_factory=dict)  # quantity -> largest part of its bound
    notes: dict[str, Any] = field(default_factory=dict)  # what rank 0 noted in the last step
    reference_facts: dict[str, Any] = field(default_factory=dict)

    def note(self, quantity: str, part: float) -> None:
        """Note how much of a bound a value takes up."""
        self.largest[quantity] = max(self.largest.get(quantity, 0.0), part)


def compare(folder: str, reference: str) -> Comparison:
    """Compare the run as configured with the run `reference`, in the order of steps, and in a step of losses,
    gradients, norm, parameters, states, buffers and frozen parameters. A run that has taken fewer steps than
    the other differs.

    Errors: FileNotFoundError if a run has recorded nothing
    """
    first = StepRecord(folder, CONFIGURED, 0, 0)
    facts = first.notes[0]
    if num_steps(folder, CONFIGURED, 0):  # a program compiles after initialize()
        facts["is_compiled"] = StepRecord(folder, CONFIGURED, 0, 1).notes[0]["is_compiled"]
    result = Comparison(facts=facts, bounds=bounds_of(facts), num_engines=num_engines(folder, CONFIGURED))
    result.reference_facts = StepRecord(folder, reference, 0, 0).notes[0]
    last = [
        min(num_steps(folder, part, one) for part in (CONFIGURED, reference))
        for one in range(result.num_engines)
    ]
    result.num_parameters = len(first.names(PARAMETER))
    before = [StepRecord(folder, CONFIGURED, one, 0) for one in range(result.num_engines)]
    frozen = [_Frozen(one) for one in before]
    for step in range(1, max(last) + 1):
        for engine in range(result.num_engines):
            if step > last[engine]:
                continue
            one = _Step(result, engine, step, before[engine], folder, reference)
            one.frozen = frozen[engine].after(one.own, one.other)
            before[engine] = one.own
            result.notes = one.own.notes[0]
            result.difference = next(one.differences(), None)
            if result.difference is not None:
                return result
        result.num_steps = step
    result.difference = next(_missing_steps(result, folder, reference), None)
    return result


def _missing_steps(result: Comparison, folder: str, reference: str) -> Iterator[FoundDifference]:
    for engine in range(result.num_engines):
        own, other = (num_steps(folder, part, engine) for part in (CONFIGURED, reference))
        if own != other:
            yield FoundDifference(
                engine=engine,
                step=min(own, other) + 1,
                quantity="number of steps",
                where="steps that the program has taken",
                configured=own,
                reference=other,
            )


class _Frozen:
    """Frozen parameters of one engine, which are recorded where the program has written to them."""

    def __init__(self, first: StepRecord) -> None:
        """`first`: the state before the first step, with which both runs begin."""
        self._first = first
        self._last: dict[str, tuple[StepRecord, StepRecord]] = {}

    def after(self, own: StepRecord, other: StepRecord) -> dict[str, tuple[StepRecord, StepRecord]]:
        """Return those that one of the runs has written to in a step, each with the records of its values
        in both.
        """
        names = dict.fromkeys((*own.names(OTHER), *other.names(OTHER)))
        for name in filter(partial(self._first.has, OTHER), names):
            before = self._last.get(name, (self._first, self._first))
            now = (
                one if one.has(OTHER, name) else old for one, old in zip((own, other), before, strict=True)
            )
            self._last[name] = next(now), next(now)
        return {name: self._last[name] for name in names if name in self._last}


class _Step:
    """One step of one engine in both runs."""

    def __init__(
        self, result: Comparison, engine: int, step: int, before: StepRecord, folder: str, reference: str
    ) -> None:
        self._result, self._engine, self._step, self._before = result, engine, step, before
        self.own = StepRecord(folder, CONFIGURED, engine, step)
        self.other = StepRecord(folder, reference, engine, step)
        self.frozen: dict[str, tuple[StepRecord, StepRecord]] = {}  # that a run has written to

    def differences(self) -> Iterator[FoundDifference]:
        """Yield all that differs, in order."""
        yield from self._losses()
        own, other = self.own.notes[0], self.other.notes[0]
        if own["is_applied"] != other["is_applied"]:
            said = {True: "is applied", False: "is skipped"}
            yield self._found(
                "update",
                where=f"it {said[own['is_applied']]} as configured, {said[other['is_applied']]} in the other",
            )
        if not own["is_applied"]:
            return
        yield from self._gradients(other["norm"] or 0.0)
        yield from self._norm(own["norm"], other["norm"])
        yield from self._parameters()
        yield from self._states()
        yield from self._buffers()
        yield from self._written()

    def _losses(self) -> Iterator[FoundDifference]:
        theirs = self.other.notes
        for rank, notes in self.own.notes.items():
            losses = theirs.get(rank, {}).get("losses", [])
            if len(notes["losses"]) != len(losses):
                numbers = {"configured": len(notes["losses"]), "reference": len(losses)}
                yield self._found("number of losses", where=f"on rank {rank}", **numbers)
                continue
            for number, (own, other) in enumerate(zip(notes["losses"], losses, strict=True)):
                where = f"micro batch {number + 1} on rank {rank}"
                yield from self._numbers("loss", own, other, self._result.bounds.loss, where)

    def _norm(self, own: float | None, other: float | None) -> Iterator[FoundDifference]:
        yield from self._numbers("norm", own, other, self._result.bounds.norm, "of all gradients")

    def _numbers(
        self, quantity: str, own: float | None, other: float | None, part: float, where: str
    ) -> Iterator[FoundDifference]:
        """Compare two numbers, None if they are not finite; the bound is `part` of the right one."""
        numbers = {"configured": own, "reference": other}
        if own is None or other is None:
            if own is not other:
                yield self._found(quantity, where=f"{where}: one of them is not finite", **numbers)
            return
        bound = part * max(abs(other), _SMALL)
        self._result.note(quantity, abs(own - other) / bound)
        if abs(own - other) > bound:
            yield self._found(quantity, bound=bound, where=where, **numbers)

    def _gradients(self, norm: float) -> Iterator[FoundDifference]:
        bounds = self._result.bounds
        for name in self.other.names(GRADIENT):
            if not self.own.has(GRADIENT, name):
                yield self._found("gradient", name=name, where="it is not there as configured")
                continue
            own, other = self.own.read(GRADIENT, name), self.other.read(GRADIENT, name)
            largest, size = self._sizes(name, other)
            bound = max(bounds.gradient * largest, bounds.floor * norm)
            yield from self._tensors("gradient", name, own, other, torch.full_like(other, bound))
            floor = bounds.floor * norm * other.numel() ** 0.5
            yield from self._whole(name, own.double(), other.double(), max(bounds.whole * size, floor))

    def _sizes(self, name: str, gradient: Tensor) -> tuple[float, float]:
        """Return the largest element and the norm of what was added up to a gradient; without a note of it,
        those of the gradient.
        """
        terms = self.other.notes[0].get("terms", {}).get(name)
        if terms is not None or not gradient.numel():
            largest, size = terms or (0.0, 0.0)
            return float(largest), float(size)
        return float(gradient.abs().max()), float(gradient.double().norm())

    def _whole(self, name: str, own: Tensor, other: Tensor, bound: float) -> Iterator[FoundDifference]:
        """Compare a gradient as a whole: rounding hits each element in another way, and a wrong scale hits
        all in the same.
        """
        if own.shape != other.shape:
            return
        distance = float((own - other).norm())
        self._result.note("whole gradient", distance / max(bound, 1e-38))
        if distance > bound:
            yield self._found(
                "gradient",
                name=name,
                configured=float(own.norm()),
                reference=float(other.norm()),
                bound=bound,
                where="norms of the whole gradient, whose elements differ alike",
                hint=_hint("gradient", own, other, None),
            )

    def _parameters(self) -> Iterator[FoundDifference]:
        bounds = self._result.bounds
        for name in self.other.names(PARAMETER):
            own, other = self.own.read(PARAMETER, name), self.other.read(PARAMETER, name)
            before = self._before.read(PARAMETER, name)
            change = float((other - before).abs().max()) if other.numel() else 0.0
            bound = bounds.parameter * torch.maximum(other.abs(), before.abs()) + bounds.update * change
            yield from self._tensors("parameter", name, own, other, bound, before)
        for rank, notes in self.own.notes.items():
            for name, here, right in notes["stale"]:
                where = f"rank {rank} computes with another value than the optimizer has updated"
                yield self._found("parameter", name=name, configured=here, reference=right, where=where)

    def _states(self) -> Iterator[FoundDifference]:
        """Compare the states that both runs have: an update by Adam hides a wrong scale of its gradients."""
        for name in self.other.names(STATE):
            if not self.own.has(STATE, name):
                continue
            own, other = self.own.read(STATE, name), self.other.read(STATE, name)
            part = max(self._result.bounds.state, 4 * torch.finfo(own.dtype).eps)
            largest = float(other.abs().max()) if other.numel() else 0.0
            bound = torch.full_like(other, max(part * largest, _DENORMAL))
            yield from self._tensors("state", name, own, other, bound)

    def _buffers(self) -> Iterator[FoundDifference]:
        """Compare what each rank's forwards have written to its buffers."""
        for key in self.other.names(BUFFER):
            if not self.own.has(BUFFER, key):
                continue
            own, other = self.own.read(BUFFER, key), self.other.read(BUFFER, key)
            rank, _, name = key.partition("/")
            for found in self._tensors("buffer", name, own, other, self._alike(other)):
                yield replace(found, where=f"rank {rank}: {found.where}")

    def _written(self) -> Iterator[FoundDifference]:
        """Compare what the program has written to frozen parameters."""
        for name, records in self.frozen.items():
            own, other = (one.read(OTHER, name) for one in records)
            yield from self._tensors("frozen parameter", name, own, other, self._alike(other))

    def _alike(self, other: Tensor) -> Tensor:
        """Return the bound of what no update has computed: integers are equal."""
        largest = float(other.double().abs().max()) if other.numel() else 0.0
        part = self._result.bounds.gradient if other.is_floating_point() else 0.0
        return torch.full(other.shape, part * largest, dtype=torch.float64, device="cpu")

    def _tensors(
        self,
        quantity: str,
        name: str,
        own: Tensor,
        other: Tensor,
        bound: Tensor,
        before: Tensor | None = None,
    ) -> Iterator[FoundDifference]:
        if own.shape != other.shape:
            where = f"its shape is {list(own.shape)}, and {list(other.shape)} in the other"
            yield self._found(quantity, name=name, where=where)
            return
        if not other.numel():
            return
        distance = torch.where(own == other, 0.0, (own.double() - other.double()).abs())
        part = (distance.nan_to_num(nan=torch.inf) / bound.double().clamp_min(1e-38)).reshape(-1)
        worst = int(part.argmax())
        self._result.note(quantity, float(part[worst]))
        if float(part[worst]) <= 1.0:
            return
        place = [int(one) for one in torch.unravel_index(torch.tensor(worst, device="cpu"), other.shape)]
        yield self._found(
            quantity,
            name=name,
            configured=float(own.reshape(-1)[worst]),
            reference=float(other.reshape(-1)[worst]),
            bound=float(bound.reshape(-1)[worst]),
            where=f"element {place} of {list(other.shape)}, the farthest beyond its bound",
            hint=_hint(quantity, own, other, before),
        )

    def _found(self, quantity: str, **more: Any) -> FoundDifference:
        return FoundDifference(engine=self._engine, step=self._step, quantity=quantity, **more)


def _hint(quantity: str, own: Tensor, other: Tensor, before: Tensor | None) -> str:
    """Return in words how the whole tensor differs; empty if no simple rule describes it."""
    own, other = own.double().reshape(-1), other.double().reshape(-1)
    if before is not None:
        own, other = own - before.double().reshape(-1), other - before.double().reshape(-1)
    what = "change" if before is not None else quantity
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
